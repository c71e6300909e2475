"""Writes a copy of a GGUF file with its matrices in another type, to measure the quality and speed of that type.

The gguf package dequantises the weights and quantises them again. Types that it cannot quantise are left to the ggml
library of llama-cpp-python (0.3.36). All weights count as equally important. Vectors and routers are not changed. A
copy that is made from a quantised file is useful only for comparisons.

Usage: python tools/requantise.py MODEL OUTPUT TYPE
"""

import ctypes
import sys
from pathlib import Path

import gguf
import numpy as np


def main() -> None:
    source, output, name = sys.argv[1:]
    qtype = gguf.GGMLQuantizationType[name]
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(output, arch)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub_type)
    for tensor in reader.tensors:
        if len(tensor.shape) == 1 or tensor.name.endswith("ffn_gate_inp.weight"):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            weights = gguf.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, quantise(weights, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{output}: {Path(output).stat().st_size / 2**20:.1f} MiB")


def quantise(weights: np.ndarray, qtype: gguf.GGMLQuantizationType) -> np.ndarray:
    """The bytes of a matrix, u8 [..., row_bytes]."""
    try:
        return gguf.quantize(weights, qtype)
    except NotImplementedError:
        return quantise_with_ggml(weights, qtype)


def quantise_with_ggml(weights: np.ndarray, qtype: gguf.GGMLQuantizationType) -> np.ndarray:
    import llama_cpp

    library = next((Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.so*"))
    function = ctypes.CDLL(str(library)).ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    pointer = ctypes.POINTER(ctypes.c_float)
    size = ctypes.c_int64
    function.argtypes = [ctypes.c_int, pointer, ctypes.c_void_p, size, size, size, pointer]
    weights = np.ascontiguousarray(weights, dtype=np.float32)
    cols = weights.shape[-1]
    rows = weights.size // cols
    out = np.empty((*weights.shape[:-1], gguf.quant_shape_to_byte_shape((cols,), qtype)[0]), dtype=np.uint8)
    importance = np.ones(cols, dtype=np.float32)
    arguments = [weights.ctypes.data_as(pointer), out.ctypes.data, 0, rows, cols, importance.ctypes.data_as(pointer)]
    if function(qtype.value, *arguments) != out.nbytes:
        sys.exit(f"ggml cannot quantise to {qtype.name}")
    return out


if __name__ == "__main__":
    main()
