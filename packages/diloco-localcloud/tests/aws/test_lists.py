"""Lists, searches and tags, with their pages and lags."""

from __future__ import annotations

import datetime

import pytest


def test_pages_newest_first(lab):
    for number in range(5):
        lab.create(f"run-{number}")
        lab.world.advance(1)
    pages = lab.api.get_paginator("list_training_jobs").paginate(PaginationConfig={"PageSize": 2})
    named = [[job["TrainingJobName"] for job in page["TrainingJobSummaries"]] for page in pages]
    assert named == [["run-4", "run-3"], ["run-2", "run-1"], ["run-0"]]
    assert lab.listed(SortBy="Name", SortOrder="Ascending")[0] == "run-0"


def test_names_are_filtered_before_paging_and_status_after(lab):
    for number in range(4):
        lab.create(f"run-{number}")
        lab.create(f"other-{number}")
        lab.world.advance(1)
    lab.world.job("run-0").stop()
    lab.world.settle()
    assert lab.listed(NameContains="run", MaxResults=3) == ["run-3", "run-2", "run-1"]
    page = lab.api.list_training_jobs(NameContains="run", MaxResults=3, StatusEquals="Stopped")
    assert page["TrainingJobSummaries"] == []
    assert lab.listed(
        NameContains="run", MaxResults=3, StatusEquals="Stopped", NextToken=page["NextToken"]
    ) == ["run-0"]


@pytest.mark.parametrize("order", ["Ascending", "Descending"])
def test_a_list_that_changes_between_its_pages_hides_no_job(lab, order):
    for number in range(6):
        lab.create(f"run-{number}").stop()
        lab.world.advance(number % 2)  # some have the same time
    lab.world.settle()
    page = lab.api.list_training_jobs(MaxResults=3, SortOrder=order)
    for each in page["TrainingJobSummaries"][:2]:
        lab.api.delete_training_job(TrainingJobName=each["TrainingJobName"])
    lab.create("run-6")
    rest = lab.listed(MaxResults=10, SortOrder=order, NextToken=page["NextToken"])
    listed = [each["TrainingJobName"] for each in page["TrainingJobSummaries"]] + rest
    assert sorted(set(listed)) == sorted(listed)
    assert set(listed) >= {f"run-{number}" for number in range(6)}


def test_times(lab):
    lab.create("old")
    lab.world.advance(100)
    lab.create("new")
    moment = datetime.datetime.fromtimestamp(lab.world.now() - 50, datetime.UTC)
    assert lab.listed(CreationTimeAfter=moment) == ["new"]
    assert lab.listed(CreationTimeBefore=moment) == ["old"]


def test_a_summary(lab):
    lab.create(Tags=[{"Key": "k", "Value": "v"}])
    (summary,) = lab.api.list_training_jobs()["TrainingJobSummaries"]
    assert set(summary) == {
        *("TrainingJobName", "TrainingJobArn", "CreationTime", "LastModifiedTime"),
        *("TrainingJobStatus", "SecondaryStatus"),
    }


def test_search_by_name_and_tag(lab):
    lab.create("run-0", Tags=[{"Key": "diloco:run", "Value": "a"}], HyperParameters={"x": "1"})
    lab.create("run-1", Tags=[{"Key": "diloco:run", "Value": "b"}])

    def found(name, operator, value):
        filters = [{"Name": name, "Operator": operator, "Value": value}]
        answer = lab.api.search(Resource="TrainingJob", SearchExpression={"Filters": filters})
        return [result["TrainingJob"]["TrainingJobName"] for result in answer["Results"]]

    assert found("Tags.diloco:run", "Equals", "b") == ["run-1"]
    assert sorted(found("TrainingJobName", "Contains", "run")) == ["run-0", "run-1"]
    assert found("HyperParameters.x", "Equals", "1") == ["run-0"]
    (first, _) = lab.api.search(
        Resource="TrainingJob", SortBy="TrainingJobName", SortOrder="Ascending"
    )["Results"]
    assert first["TrainingJob"]["Tags"] == [{"Key": "diloco:run", "Value": "a"}]
    assert first["TrainingJob"]["SecondaryStatusTransitions"]
    with lab.refused("ValidationException", "Contains and Equals, not GreaterThan"):
        found("CreationTime", "GreaterThan", "1")
    with lab.refused("ValidationException", "serves Filters alone in a search, not Operator"):
        lab.api.search(Resource="TrainingJob", SearchExpression={"Operator": "Or"})
    with lab.refused("ValidationException", "searches only for TrainingJob"):
        lab.api.search(Resource="Endpoint")


def test_list_and_search_lag_behind(lab):
    lab.world.habits.list_lag, lab.world.habits.search_lag = 5.0, 60.0
    job = lab.create()
    assert lab.listed() == []
    lab.world.advance(5)
    assert lab.listed() == ["job"]
    assert lab.api.search(Resource="TrainingJob")["Results"] == []
    job.start()
    lab.world.advance(59)
    (result,) = lab.api.search(Resource="TrainingJob")["Results"]
    assert result["TrainingJob"]["SecondaryStatus"] == "Starting"
    assert lab.api.list_training_jobs()["TrainingJobSummaries"][0]["SecondaryStatus"] == "Training"
    job.stop()
    lab.world.settle()
    lab.api.delete_training_job(TrainingJobName="job")
    assert lab.listed() == ["job"]
    lab.world.advance(5)
    assert lab.listed() == []


def test_tags(lab):
    lab.create(Tags=[{"Key": "a", "Value": "1"}])
    arn = lab.describe()["TrainingJobArn"]
    lab.api.add_tags(ResourceArn=arn, Tags=[{"Key": "a", "Value": "2"}, {"Key": "b", "Value": "3"}])
    tags = [{"Key": "a", "Value": "2"}, {"Key": "b", "Value": "3"}]
    assert lab.api.list_tags(ResourceArn=arn)["Tags"] == tags
    with lab.refused("UnknownOperationException", "does not know sagemaker DeleteTags"):
        lab.api.delete_tags(ResourceArn=arn, TagKeys=["a"])
    with lab.refused("ValidationException", "Requested resource not found"):
        lab.api.list_tags(ResourceArn=arn + "-none")


def test_a_token_of_somebody_else(lab):
    with lab.refused("ValidationException", "Invalid pagination token"):
        lab.api.list_training_jobs(NextToken="bm9uZQ==")
