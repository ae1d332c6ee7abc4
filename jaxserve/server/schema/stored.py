"""What is asked and answered about files and batches: `/v1/files` and `/v1/batches`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType, field

from jaxserve.server.schema.answers import Answer, CompletionTokensDetails, PromptTokensDetails
from jaxserve.server.schema.body import Body

MIN_SECONDS_TO_LIVE = 3600
MAX_SECONDS_TO_LIVE = 30 * 24 * 3600
MAX_FILES_LISTED = 10_000
MAX_BATCHES_LISTED = 100

SecondsToLive = Annotated[
    int,
    Meta(
        ge=MIN_SECONDS_TO_LIVE,
        le=MAX_SECONDS_TO_LIVE,
        description="Seconds after which a file is deleted, from an hour to 30 days.",
    ),
]
Anchor = Annotated[Literal["created_at"], Meta(description="From when on the seconds count.")]
After = Annotated[str, Meta(description="The id after which the page begins.")]
Purpose = Literal["batch", "batch_output"]
BatchEndpoint = Literal["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"]


class ExpiresAfter(Body, frozen=True, kw_only=True):
    """When a file is deleted by itself."""

    anchor: Anchor
    seconds: SecondsToLive


# --- files ------------------------------------------------------------------------------------------------------------


class FileForm(Body, frozen=True, kw_only=True):
    """The form of `/v1/files`."""

    file: Annotated[
        str, Meta(extra_json_schema={"format": "binary", "contentMediaType": "application/octet-stream"}, description="Lines.")
    ]
    purpose: Annotated[Literal["batch"], Meta(description="What the file is for.")]
    expires_after_anchor: Anchor | None = field(default=None, name="expires_after[anchor]")
    expires_after_seconds: SecondsToLive | None = field(default=None, name="expires_after[seconds]")


class FileQuery(Body, frozen=True, kw_only=True):
    """Which files are listed."""

    limit: Annotated[int, Meta(ge=1, le=MAX_FILES_LISTED)] = MAX_FILES_LISTED
    after: After | None = None
    order: Annotated[Literal["asc", "desc"], Meta(description="Oldest or newest first.")] = "desc"
    purpose: str | None = None


class File(Answer, frozen=True, kw_only=True):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | UnsetType = UNSET
    filename: str
    purpose: Purpose
    status: Literal["processed"]


class FileList(Answer, frozen=True, kw_only=True):
    """A page of files."""

    object: Literal["list"]
    data: list[File]
    first_id: str
    last_id: str
    has_more: bool


class FileDeleted(Answer, frozen=True, kw_only=True):
    """A file that is no more."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


# --- batches ----------------------------------------------------------------------------------------------------------

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16, description="The caller's own notes, which come back with the batch."),
]


class BatchRequest(Body, frozen=True, kw_only=True):
    """A body of `/v1/batches`."""

    input_file_id: Annotated[str, Meta(description="A file that was uploaded with purpose batch.")]
    endpoint: Annotated[BatchEndpoint, Meta(description="What every line of the file is for.")]
    completion_window: Annotated[Literal["24h"], Meta(description="After which lines without an answer are given up.")]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchQuery(Body, frozen=True, kw_only=True):
    """Which batches are listed, newest first."""

    limit: Annotated[int, Meta(ge=1, le=MAX_BATCHES_LISTED)] = 20
    after: After | None = None


class BatchError(Answer, frozen=True, kw_only=True):
    """What is wrong with a batch's file, or why it waits."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(Answer, frozen=True, kw_only=True):
    """All of that."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(Answer, frozen=True, kw_only=True):
    """Lines of a batch."""

    total: int
    completed: int
    failed: int


class BatchUsage(Answer, frozen=True, kw_only=True):
    """Tokens of all answers."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class Batch(Answer, frozen=True, kw_only=True):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: BatchEndpoint
    model: str
    errors: BatchErrors | UnsetType = UNSET
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
    output_file_id: str | UnsetType = UNSET
    error_file_id: str | UnsetType = UNSET
    created_at: int
    expires_at: int
    in_progress_at: int | UnsetType = UNSET
    finalizing_at: int | UnsetType = UNSET
    completed_at: int | UnsetType = UNSET
    failed_at: int | UnsetType = UNSET
    expired_at: int | UnsetType = UNSET
    cancelling_at: int | UnsetType = UNSET
    cancelled_at: int | UnsetType = UNSET
    request_counts: RequestCounts
    usage: BatchUsage | UnsetType = UNSET
    metadata: Metadata | None


class BatchList(Answer, frozen=True, kw_only=True):
    """A page of batches."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str
    last_id: str
    has_more: bool
