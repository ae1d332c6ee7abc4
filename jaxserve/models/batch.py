"""One step's batch as a model sees it."""

from __future__ import annotations

from flax import struct
from jaxtyping import Array, Int


@struct.dataclass
class StepBatch:
    """`T` tokens in `R` rows of one sequence each; `paged_attention` says how rows own tokens.

    Attributes:
        token_ids: padding tokens hold 0.
        page_ids: page that each token's K and V go to; `P`, which is no page, for padding tokens.
        page_offsets: place within the page.
        last_token: index of each row's last token; 0 for padding rows.
    """

    token_ids: Int[Array, " T"]
    positions: Int[Array, " T"]
    page_ids: Int[Array, " T"]
    page_offsets: Int[Array, " T"]
    block_table: Int[Array, "R W"]
    row_offsets: Int[Array, "R+1"]
    lengths: Int[Array, " R"]
    last_token: Int[Array, " R"]
