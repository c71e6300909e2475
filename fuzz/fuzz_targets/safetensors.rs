//! Any bytes are either a safetensors header or an error. Run, from the root of the repository:
//!
//! ```text
//! tools/golden unpack
//! mkdir -p fuzz/corpus/safetensors && cp crates/engine/tests/data/golden/*/*.safetensors fuzz/corpus/safetensors/
//! cargo +nightly fuzz run safetensors -- -malloc_limit_mb=64 -max_len=16384 -max_total_time=120
//! ```

#![no_main]

use std::path::Path;

use forebay_engine::internals::format::{FileIdx, safetensors};
use libfuzzer_sys::fuzz_target;

/// Bytes of data after the fuzzer's input: enough for small tensors.
const DATA: u64 = 1 << 20;

fuzz_target!(|text: &[u8]| {
    let path = Path::new("fuzz.safetensors");
    // Once as the whole file, and once as its header.
    let framed = [&(text.len() as u64).to_le_bytes()[..], text].concat();
    for bytes in [text, &framed] {
        for len in [bytes.len() as u64, bytes.len() as u64 + DATA] {
            let Ok(header) = safetensors::parse(path, &mut &*bytes, len, FileIdx(0)) else { continue };
            let mut end = None;
            for tensor in &header.tensors {
                assert!(end.is_none_or(|end| end == tensor.offset));
                let after = tensor.offset.checked_add(tensor.len).expect("the end of a tensor fits");
                assert!(after <= len);
                assert_eq!(tensor.dtype.row_bytes(tensor.elements() as usize), Some(tensor.len as usize));
                end = Some(after);
            }
        }
    }
});
