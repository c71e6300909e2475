//! Any bytes are either a model or an error. Run, from the root of the repository:
//!
//! ```text
//! (cd fuzz && cargo run --example seed_gguf)
//! cargo +nightly fuzz run gguf -- -malloc_limit_mb=64 -max_total_time=120
//! ```

#![no_main]

use std::path::Path;

use forebay_engine::internals::format::{ModelFile, gguf};
use libfuzzer_sys::fuzz_target;

/// Bytes of data after the fuzzer's input: enough for small tensors.
const DATA: u64 = 1 << 20;

fuzz_target!(|header: &[u8]| {
    for len in [header.len() as u64, header.len() as u64 + DATA] {
        if let Ok(model) = gguf::parse(Path::new("fuzz.gguf"), &mut &*header, len) {
            check(&model, len);
        }
    }
});

/// What all users of a parsed header rely on.
fn check(model: &ModelFile, len: u64) {
    let mut places: Vec<(u64, u64)> = Vec::new();
    for tensor in &model.tensors {
        let end = tensor.offset.checked_add(tensor.len).expect("the end of a tensor fits");
        assert!(end <= len && tensor.len > 0 && tensor.elements() > 0);
        assert_eq!(model.tensor(&tensor.name), Some(tensor));
        places.push((tensor.offset, end));
    }
    places.sort_unstable();
    assert!(places.is_sorted_by(|before, after| before.1 <= after.0));

    for (key, value) in model.metadata.iter() {
        assert_eq!(model.metadata.get(key).is_some(), !key.is_empty());
        let texts = value.as_strings().map_or(0, |texts| texts.iter().count());
        let numbers = value.as_numbers().map_or(0, |numbers| numbers.iter().count());
        assert!((texts + numbers) as u64 <= len);
    }
}
