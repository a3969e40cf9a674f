"""What to do about an answer of a store that does not pass by itself, as a text for errors."""

from __future__ import annotations

from ._driver import Verdict

_ADVICE = {
    Verdict.NO_BUCKET: "The bucket does not exist: create it, or correct the URI.",
    Verdict.EXPIRED: "The credentials have ended, or cannot be had at the moment. Use a source that renews them (a role, web "
    "identity, a credential process, SSO): credentials in environment variables and in files are never renewed. For SSO, log "
    "in again. If they are new, set this machine's clock.",
    Verdict.CLOCK: "The clock of this machine is wrong: set it (with NTP, for instance). S3 allows 15 minutes.",
    Verdict.WRONG_PLACE: "The bucket is in another region, or belongs to another endpoint: set AWS_REGION and "
    "AWS_DEFAULT_REGION to its region, or AWS_ENDPOINT_URL.",
    Verdict.THROTTLED: "The store limits how many requests it takes: use fewer connections= per replica, or larger shares of "
    "its limits.",
}


def advice(verdict: Verdict, verb: str, driver: str) -> str:
    """The text; empty where there is nothing to say.

    Args:
        verdict: What the answer means.
        verb: What was to be done: create, write, read, list or delete.
        driver: The name of the driver.
    """
    if verdict is Verdict.FORBIDDEN:
        conditional = (
            " If they may write, then a policy of the bucket refuses conditional writes (If-None-Match), which an exclusive "
            "write needs: allow them."
            if verb == "create"
            else ""
        )
        return (
            f"Access was denied: check that this process's credentials (those that {driver} finds by itself) may put, get, list "
            f"and delete below the prefix.{conditional}"
        )
    if verdict is Verdict.REFUSED:
        return f"The store refuses this kind of request, so it was not tried again. {_way_out(verb, driver)}"
    return _ADVICE.get(verdict, "")


def _way_out(verb: str, driver: str) -> str:
    if verb == "create":
        return (
            "It is a conditional write (If-None-Match: *), by which replicas agree on who is first. Use a store that has them, "
            "such as S3, or a folder that all replicas share."
        )
    if driver == "obstore":
        other = "deletes objects one by one" if verb == "delete" else "sends other requests"
        return f"Try fsspec+s3:// in place of s3://, which {other}."
    if "s3" in driver:
        return (
            "If it is the checksum that newer SDKs add, set AWS_REQUEST_CHECKSUM_CALCULATION=when_required and "
            "AWS_RESPONSE_CHECKSUM_VALIDATION=when_required; or try obstore+s3://."
        )
    return ""
