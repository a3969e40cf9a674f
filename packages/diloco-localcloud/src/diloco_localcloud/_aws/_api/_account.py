"""The facts about an account that a launcher reads first: its quotas and its registry's images."""

from __future__ import annotations

from typing import Any

from .._model._refused import RefusedError
from .._training._region import Region
from ._paging import page

Json = dict[str, Any]

_USES = ("training job usage", "spot training job usage")


class Quotas:
    """The operations of Service Quotas; called under the region's lock."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def _serve_list_service_quotas(self, request: Json) -> Json:
        quotas = self._region.habits.quotas
        entries = [
            {"ServiceCode": "sagemaker", "QuotaName": f"{kind} for {use}", "Value": float(most)}
            for kind, most in sorted(quotas.items())
            for use in _USES
            if request["ServiceCode"] == "sagemaker"
        ]
        part, token = page(entries, request.get("MaxResults", 100), request.get("NextToken"))
        return {"Quotas": part} | ({} if token is None else {"NextToken": token})


class Registry:
    """The operations of ECR; called under the region's lock."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def _serve_describe_images(self, request: Json) -> Json:
        repository, images = request["repositoryName"], []
        for wanted in request.get("imageIds") or []:
            name = wanted.get("imageTag") or wanted.get("imageDigest")
            if f"{repository}:{name}" in self._region.habits.missing_images:
                raise RefusedError(
                    "ImageNotFoundException",
                    f"The image with imageId {{imageDigest:'null', imageTag:'{name}'}} does not "
                    f"exist within the repository with name '{repository}' in the registry with "
                    f"id '{self._region.account}'",
                )
            images.append({"repositoryName": repository, "imageTags": [name]})
        return {"imageDetails": images}
