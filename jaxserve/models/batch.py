"""One step's batch as a model sees it."""

from __future__ import annotations

from jaxtyping import Array, Int

from pallas_kernels import pytree

NO_PAGE = 2**30
"""Past the pool's end in every layer: what is written there is dropped."""


@pytree.dataclass
class LocalRows:
    """What `StepBatch` has by these names, of the layers with a window where their pages are in pools of their own."""

    page_ids: Int[Array, " T"]
    block_table: Int[Array, "S local"]
    lengths: Int[Array, " S"]


@pytree.dataclass
class StepBatch:
    """`T` tokens in `S` rows of one sequence each; `paged_attention` says how rows own tokens.

    Attributes:
        token_ids: padding tokens hold 0.
        page_ids: page that each token's K and V go to, in each layer's pages; `NO_PAGE` for padding tokens.
        page_offsets: place within the page.
        block_table, lengths: pages of each row from the first that any layer sees, and tokens from the start of that page.
        local: None where all layers have their pages in the same order.
        adapters: each token's adapter, -1 for none; None where the step has no adapters.
    """

    token_ids: Int[Array, " T"]
    positions: Int[Array, " T"]
    page_ids: Int[Array, " T"]
    page_offsets: Int[Array, " T"]
    block_table: Int[Array, "S W"]
    row_offsets: Int[Array, "S+1"]
    lengths: Int[Array, " S"]
    local: LocalRows | None = None
    adapters: Int[Array, " T"] | None = None
