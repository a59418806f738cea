"""The kernels' argument lists by name and order, for whoever launches them.

Kept apart from the kernels so that a cached Program runs on a machine without flydsl.
"""

# K4's arguments: addresses as Int64, those of INT32_ARGS as Int32.
ARG_NAMES = (
    "h_in", "q", "block_table", "seq_lens", "k_cache", "v_cache", "k_scale", "v_scale",
    "w_o", "s_o", "g_post", "w_gate", "bias", "w13", "s13", "w2", "s2", "sh_args",
    "h_mid", "ar_out", "scratch", "sym", "peers", "step", "rank", "layer", "bt_width", "q_len",
    "tl", "k1_args", "positions", "slot_mapping", "res",
)  # fmt: skip
INT32_ARGS = ("rank", "layer", "bt_width", "q_len")
