"""Answers of the services that speak XML: those of STS and IAM, and the refusals of S3."""

from __future__ import annotations

import urllib.parse
from xml.sax.saxutils import escape

from ..._server._http import Request, Response
from .._model._refused import RefusedError
from .._training._region import TrainingHabits

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
_STATUS = {
    "SlowDown": 503,
    "AccessDenied": 403,
    "InvalidAccessKeyId": 403,
    "InvalidClientTokenId": 403,
    "SignatureDoesNotMatch": 403,
}
_KNOWN = {"sts": "GetCallerIdentity", "iam": "SimulatePrincipalPolicy"}


def form_operation(request: Request, service: str) -> str:
    """Return the operation of STS or IAM that a form asks for; refuse an unknown one."""
    operation = _form(request).get("Action", "")
    if operation != _KNOWN[service]:
        raise RefusedError(
            "InvalidAction",
            f"the stand-in does not know {service} {operation}; it knows {_KNOWN[service]}",
        )
    return operation


def simulated(request: Request, habits: TrainingHabits) -> Response:
    """Return what IAM decides about one action.

    A role of ``refused_roles`` may not be passed; one of ``roles_without_rights`` may do nothing.
    """
    form = _form(request)
    action, resource = form.get("ActionNames.member.1", ""), form.get("ResourceArns.member.1", "*")
    refused = resource in habits.refused_roles if action == "iam:PassRole" else False
    refused |= form.get("PolicySourceArn", "") in habits.roles_without_rights
    decision = "implicitDeny" if refused else "allowed"
    body = (
        f'<SimulatePrincipalPolicyResponse xmlns="{_IAM}"><SimulatePrincipalPolicyResult>'
        "<IsTruncated>false</IsTruncated><EvaluationResults><member>"
        f"<EvalActionName>{escape(action)}</EvalActionName>"
        f"<EvalResourceName>{escape(resource)}</EvalResourceName>"
        f"<EvalDecision>{decision}</EvalDecision></member></EvaluationResults>"
        f"</SimulatePrincipalPolicyResult>{_METADATA}</SimulatePrincipalPolicyResponse>"
    )
    return Response(200, body.encode(), "text/xml")


def _form(request: Request) -> dict[str, str]:
    form = urllib.parse.parse_qs(request.body.decode("utf-8", "replace"))
    return {key: values[0] for key, values in form.items()}


def caller_identity(caller: str, account: str) -> Response:
    """Return the answer to GetCallerIdentity."""
    result = f"<Arn>{escape(caller)}</Arn><UserId>AIDASTANDIN</UserId><Account>{account}</Account>"
    body = (
        f'<GetCallerIdentityResponse xmlns="{_NAMESPACE}"><GetCallerIdentityResult>{result}'
        f"</GetCallerIdentityResult>{_METADATA}</GetCallerIdentityResponse>"
    )
    return Response(200, body.encode(), "text/xml")


def refusal(service: str, refused: RefusedError) -> Response:
    """Return an error of STS, IAM or S3 as XML."""
    code = refused.code.removesuffix("Exception")
    code = (_OF_S3 if service == "s3" else _OF_FORMS).get(code, code)
    status = _STATUS.get(code, refused.status)
    error = f"<Error><Code>{code}</Code><Message>{escape(refused.message)}</Message></Error>"
    if service in {"sts", "iam"}:
        name = "<RequestId>stand-in</RequestId>"
        error = f'<ErrorResponse xmlns="{_NAMESPACE}">{error}{name}</ErrorResponse>'
    return Response(
        status, error.encode(), "text/xml" if service in {"sts", "iam"} else "application/xml"
    )
