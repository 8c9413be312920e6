"""AWQ, as AutoAWQ writes it for its matrix product ("gemm")."""

from __future__ import annotations

from firsttoken.checkpoint.json_files import JSONObject
from firsttoken.checkpoint.quantized.compressed import check_group
from firsttoken.checkpoint.quantized.scheme import LinearScheme
from firsttoken.checkpoint.quantized.targets import ALL, Targets, TargetScheme, read_names


def read_awq(config: JSONObject) -> TargetScheme:
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
    # Each names all linears whose name it is a part of. The head is none that AWQ rounds.
    return TargetScheme(((ALL, scheme),), Targets(parts=("lm_head", *read_names(config, "modules_to_not_convert"))))
