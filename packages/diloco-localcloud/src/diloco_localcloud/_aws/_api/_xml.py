"""Answers of the services that speak XML: those of STS and IAM, and the refusals of S3."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from xml.sax.saxutils import escape

from ..._server._http import Request, Response
from .._model._refused import RefusedError
from .._training._region import Region

_IAM = "https://iam.amazonaws.com/doc/2010-05-08/"
_NAMESPACE = "https://sts.amazonaws.com/doc/2011-06-15/"
_METADATA = "<ResponseMetadata><RequestId>stand-in</RequestId></ResponseMetadata>"

# What is known as JSON by one code has another in XML.
_OF_S3 = {
    "UnrecognizedClient": "InvalidAccessKeyId",
    "InternalFailure": "InternalError",
    "Throttling": "SlowDown",
}
_OF_FORMS = {
    "UnrecognizedClient": "InvalidClientTokenId",
    "InvalidSignature": "SignatureDoesNotMatch",
}
_FORBIDDEN = ["AccessDenied", "InvalidAccessKeyId", "InvalidClientTokenId", "SignatureDoesNotMatch"]


def form(request: Request) -> dict[str, str]:
    """Return the fields of the form that a request to STS or IAM is."""
    fields = urllib.parse.parse_qs(request.body.decode("utf-8", "replace"))
    return {key: values[0] for key, values in fields.items()}


class Identity:
    """The operations of STS and IAM; called under the region's lock."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def _serve_get_caller_identity(self, _: Mapping[str, str]) -> str:
        return (
            f'<GetCallerIdentityResponse xmlns="{_NAMESPACE}"><GetCallerIdentityResult>'
            f"<Arn>{escape(self._region.caller)}</Arn><UserId>AIDASTANDIN</UserId>"
            f"<Account>{self._region.account}</Account></GetCallerIdentityResult>{_METADATA}"
            "</GetCallerIdentityResponse>"
        )

    def _serve_simulate_principal_policy(self, form: Mapping[str, str]) -> str:
        """Decide about one action.

        A role of ``refused_roles`` may not be passed; one of ``roles_without_rights`` may do
        nothing.
        """
        action, habits = form.get("ActionNames.member.1", ""), self._region.habits
        resource = form.get("ResourceArns.member.1", "*")
        refused = action == "iam:PassRole" and resource in habits.refused_roles
        refused |= form.get("PolicySourceArn", "") in habits.roles_without_rights
        return (
            f'<SimulatePrincipalPolicyResponse xmlns="{_IAM}"><SimulatePrincipalPolicyResult>'
            "<IsTruncated>false</IsTruncated><EvaluationResults><member>"
            f"<EvalActionName>{escape(action)}</EvalActionName>"
            f"<EvalResourceName>{escape(resource)}</EvalResourceName>"
            f"<EvalDecision>{'implicitDeny' if refused else 'allowed'}</EvalDecision></member>"
            f"</EvaluationResults></SimulatePrincipalPolicyResult>{_METADATA}"
            "</SimulatePrincipalPolicyResponse>"
        )


def refusal(service: str, refused: RefusedError) -> Response:
    """Return an error of STS, IAM or S3 as XML."""
    code = refused.code.removesuffix("Exception")
    code = (_OF_S3 if service == "s3" else _OF_FORMS).get(code, code)
    status = 503 if code == "SlowDown" else 403 if code in _FORBIDDEN else refused.status
    error = f"<Error><Code>{code}</Code><Message>{escape(refused.message)}</Message></Error>"
    if service == "s3":
        return Response(status, error.encode(), "application/xml")
    name = "<RequestId>stand-in</RequestId>"
    error = f'<ErrorResponse xmlns="{_NAMESPACE}">{error}{name}</ErrorResponse>'
    return Response(status, error.encode(), "text/xml")
