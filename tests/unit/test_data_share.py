"""Shares of ranks: a worked example, and each message in full."""

from __future__ import annotations

import re

import pytest

from lib.data.share import Share, places


def test_a_rank_has_a_block_of_rows_in_each_micro_batch() -> None:
    assert [places(Share(rank, 2), 8, 2).tolist() for rank in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [places(Share(rank, 4), 4, 1).tolist() for rank in range(4)] == [[0], [1], [2], [3]]
    assert places(Share(), 6, 3).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("share", "message"), [
    (Share(2, 2), "rank=2 must be in [0, 2), the number of ranks"),
    (Share(-1, 2), "rank=-1 must be in [0, 2), the number of ranks"),
    (Share(0, 0), "rank=0 must be in [0, 0), the number of ranks"),
    (Share(0, 3), "batch.rows=8 must be a multiple of 6: batch.micro=2 on each of 3 ranks"),
])  # fmt: skip
def test_what_cannot_be_shared_is_refused(share: Share, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        places(share, 8, 2)
