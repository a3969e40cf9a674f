"""RPCs about a client's other needs: environments, secrets, images, mounts, volumes, blobs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from modal_proto import api_pb2

from .._workspace._habits import new_id
from .._workspace._refused import RefusedError, not_found
from .._workspace._workspace import Secret, Workspace
from ._context import Bell, Context, Rpcs

_IMAGE_BUILDER = "2025.06"


class Objects(Rpcs):
    """Operations on a workspace's objects other than apps, calls and Dicts.

    Args:
        workspace: the workspace.
        bell: rung after every change of it.
        blob_url: returns, for the ID of a blob and an HTTP method, the URL to send or fetch it.
    """

    def __init__(
        self, workspace: Workspace, bell: Bell, blob_url: Callable[[str, str], str]
    ) -> None:
        super().__init__(workspace, bell)
        self._blob_url = blob_url
        self._volumes: dict[tuple[str, str], str] = {}

    def _serve_client_hello(self, _: Any, __: Context) -> Any:
        return api_pb2.ClientHelloResponse(image_builder_version=_IMAGE_BUILDER)

    def _serve_workspace_name_lookup(self, _: Any, __: Context) -> Any:
        name = self._workspace.name
        return api_pb2.WorkspaceNameLookupResponse(workspace_name=name, username=name)

    def _serve_environment_get_or_create(self, request: Any, _: Context) -> Any:
        name = request.deployment_name
        if name and name not in self._workspace.environments:
            # Not NOT_FOUND as elsewhere: the server in the client's own tests answers in this way.
            raise RefusedError("INVALID_ARGUMENT", f"Environment '{name}' not found")
        name = self._workspace.environment(name)
        answer = api_pb2.EnvironmentGetOrCreateResponse(environment_id=f"en-{name}")
        answer.metadata.name = name
        answer.metadata.settings.image_builder_version = _IMAGE_BUILDER
        return answer

    def _serve_secret_get_or_create(self, request: Any, _: Context) -> Any:
        environment = self._workspace.environment(request.environment_name)
        kind, name = request.object_creation_type, request.deployment_name
        secret = self._workspace.find_secret(environment, name)
        if kind == api_pb2.OBJECT_CREATION_TYPE_CREATE_FAIL_IF_EXISTS and secret is not None:
            raise RefusedError("ALREADY_EXISTS", f"Secret '{name}' already exists")
        overwrite = kind == api_pb2.OBJECT_CREATION_TYPE_CREATE_OVERWRITE_IF_EXISTS
        if overwrite or (secret is None and kind != api_pb2.OBJECT_CREATION_TYPE_UNSPECIFIED):
            secret = self._workspace.create_secret(environment, name, request.env_dict)
        if secret is None:
            raise not_found(f"Secret '{name}' not found in environment '{environment}'")
        missing = [key for key in request.required_keys if key not in secret.values]
        if missing:
            raise RefusedError(
                "FAILED_PRECONDITION", f"Secret is missing key(s): {', '.join(missing)}"
            )
        answer = api_pb2.SecretGetOrCreateResponse(secret_id=secret.secret_id)
        self._describe(answer.metadata, secret)
        return answer

    def _describe(self, metadata: Any, secret: Secret) -> None:
        metadata.name = secret.name
        metadata.creation_info.created_at = secret.created
        metadata.creation_info.created_by = self._workspace.name
        if "keys" in metadata.DESCRIPTOR.fields_by_name:  # some versions of the client lack it
            metadata.keys.extend(sorted(secret.values))

    def _serve_secret_list(self, request: Any, _: Context) -> Any:
        environment = self._workspace.environment(request.environment_name)
        answer = api_pb2.SecretListResponse(environment_name=environment)
        before = request.pagination.created_before
        kept = [secret for secret in self._workspace.secrets.values() if secret.name]
        for secret in kept[::-1]:
            if secret.environment == environment and (not before or secret.created < before):
                item = answer.items.add(
                    label=secret.name, created_at=secret.created, secret_id=secret.secret_id
                )
                self._describe(item.metadata, secret)
        return answer

    def _serve_image_get_or_create(self, _: Any, __: Context) -> Any:
        answer = api_pb2.ImageGetOrCreateResponse(image_id=new_id("im"))
        answer.result.status = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
        answer.metadata.image_builder_version = _IMAGE_BUILDER
        return answer

    def _serve_mount_get_or_create(self, request: Any, _: Context) -> Any:
        # Mounts without files are those of the client's own libraries, which every image has
        # already.
        mount_id = new_id("mo")
        files = [(file.filename, file.sha256_hex) for file in request.files]
        self._workspace.mounts[mount_id] = files
        answer = api_pb2.MountGetOrCreateResponse(mount_id=mount_id)
        checksum = hashlib.sha256(repr(sorted(files)).encode()).hexdigest()
        answer.handle_metadata.content_checksum_sha256_hex = checksum
        return answer

    def _serve_mount_batched_check_existence(self, request: Any, _: Context) -> Any:
        files = self._workspace.files
        missing = [digest for digest in request.sha256_hex_hashes if digest not in files]
        return api_pb2.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=missing)

    def _serve_mount_put_file(self, request: Any, _: Context) -> Any:
        files, digest = self._workspace.files, request.sha256_hex
        if request.WhichOneof("data_oneof"):
            blob_id = request.data_blob_id
            files[digest] = self._workspace.blobs[blob_id] if blob_id else request.data
        return api_pb2.MountPutFileResponse(exists=digest in files)

    def _serve_volume_get_or_create(self, request: Any, _: Context) -> Any:
        environment = self._workspace.environment(request.environment_name)
        key = (environment, request.deployment_name)
        if key not in self._volumes:
            if request.object_creation_type == api_pb2.OBJECT_CREATION_TYPE_UNSPECIFIED:
                raise not_found(f"Volume '{key[1]}' not found in environment '{environment}'")
            self._volumes[key] = new_id("vo")
        answer = api_pb2.VolumeGetOrCreateResponse(volume_id=self._volumes[key])
        answer.metadata.name = key[1]
        return answer

    def _serve_blob_create(self, _: Any, __: Context) -> Any:
        blob_id = new_id("bl")
        answer = api_pb2.BlobCreateResponse(blob_id=blob_id, blob_ids=[blob_id])
        answer.upload_urls.items.append(self._blob_url(blob_id, "PUT"))
        return answer

    def _serve_blob_get(self, request: Any, _: Context) -> Any:
        if request.blob_id not in self._workspace.blobs:
            raise not_found(f"Blob with ID '{request.blob_id}' not found")
        return api_pb2.BlobGetResponse(download_url=self._blob_url(request.blob_id, "GET"))
