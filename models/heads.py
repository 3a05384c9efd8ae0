"""What a decoder layer gives its attention: queries, keys and values, not rotated yet."""

from __future__ import annotations

import flax.struct
import jax

from paged_jax.models import layers


@flax.struct.dataclass
class ProjectedHeads:
    """A step's queries, keys and values as their product wrote them, and the angles to turn by.

    Together, because an attention that has an operation for it turns, splits and stores them in
    one pass over the rows; every other takes `rotated`.
    """

    rows: jax.Array  # [T, Hkv, G + 2, D]: of each KV head its G queries, its key and its value
    cos: jax.Array  # float32[T, D / 2]
    sin: jax.Array  # the same

    def rotated(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q[T, Hkv * G, D], k[T, Hkv, D] and v[T, Hkv, D] in the dtype of rows; q and k turned."""
        num_rows, _, group_and_two, head_dim = self.rows.shape
        num_queries = group_and_two - 2
        # Each group's queries and its key in one operation, which is less to compile than two.
        turned = self.rows[:, :, : num_queries + 1].reshape(num_rows, -1, head_dim)
        turned = layers.apply_rope(turned, self.cos, self.sin)
        turned = turned.reshape(num_rows, -1, num_queries + 1, head_dim)
        q = turned[:, :, :num_queries].reshape(num_rows, -1, head_dim)
        return q, turned[:, :, num_queries], self.rows[:, :, num_queries + 1]
