"""AWQ, as AutoAWQ writes it for its matrix product ("gemm")."""

from __future__ import annotations

import re

from firsttoken.checkpoint.json_files import JSONObject
from firsttoken.checkpoint.quantized.compressed import check_group, names
from firsttoken.checkpoint.quantized.scheme import LinearScheme, QuantScheme, SchemeGroup


def read_awq(config: JSONObject) -> QuantScheme:
    """Raises `CheckpointError` for what would not be honoured."""
    bits = config.integer("w_bit" if "w_bit" in config else "bits")
    if bits != 4:
        raise config.fail("bits", f"is {bits}, only 4 is supported")
    version = config.text("version", "gemm").lower()
    if version != "gemm":
        raise config.fail("version", f"{version!r:.80} is not supported, only 'gemm' is")
    if not config.flag("zero_point", True):
        raise config.fail("zero_point", "is false: without zero points AWQ has no layout that is known")
    key = "q_group_size" if "q_group_size" in config else "group_size"
    group = check_group(config, config.integer(key), "int4", key)
    scheme = LinearScheme("int4", group, True, "awq")
    # Each names all linears whose name it is a part of.
    skipped = tuple(f"re:.*{re.escape(part)}" for part in names(config, "modules_to_not_convert"))
    return QuantScheme(method="awq", groups=(SchemeGroup((r"re:model\.layers\.",), scheme),), ignore=skipped)
