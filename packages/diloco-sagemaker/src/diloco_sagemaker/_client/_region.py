"""Check that a region exists.

Otherwise a mistake in its name would only be noticed when no address answers.
"""

from __future__ import annotations

from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import shown

from .._request._options import check_region_name


def check_region(session: Any, client: Any, region: str | None) -> None:
    """Refuse a region in which boto3 knows no SageMaker, if the client calls AWS itself.

    Args:
        session: The session that the client was made with.
        client: A client that is about to be used. If it calls another address, such as that of a
            stand-in, any region is allowed.
        region: The region that it was made for. The client's own may be the name for all regions.

    Raises:
        InvalidRequestError: There is no such region.
    """
    if region is not None:
        check_region_name(
            "the region (AWS_REGION, AWS_DEFAULT_REGION, or region in the profile)", region
        )
    if region not in client.meta.endpoint_url.split("//")[-1].split("."):
        return  # a stand-in, a proxy, or a service of all regions
    known = sorted(
        name
        for partition in session.get_available_partitions()
        for name in session.get_available_regions("sagemaker", partition)
    )
    if region not in known:
        raise InvalidRequestError(
            f"region={region!r}: boto3 knows no such region with SageMaker, but these: "
            f"{', '.join(known)}. If it is new, upgrade boto3"
        )


def check_region_of_logs(client: Any, logs_client: Any) -> None:
    """Refuse a caller's client of logs for another region than the client of jobs.

    It would find no logs.

    Raises:
        InvalidRequestError: The regions differ.
    """
    jobs_region, logs_region = (
        client.meta.region_name,
        getattr(getattr(logs_client, "meta", None), "region_name", None),
    )
    if logs_region is not None and logs_region != jobs_region:
        raise InvalidRequestError(
            f"jobs and their logs are in one region, and logs_client is in {shown(logs_region)}, "
            f"while jobs are looked for in {shown(jobs_region)}: pass region={shown(logs_region)}, "
            "or a logs_client of the other"
        )
