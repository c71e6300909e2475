//! Any metadata of a GGUF file give either a working tokenizer or an error. Run, from the root of the repository:
//!
//! ```text
//! (cd fuzz && cargo run --example seed_tokenizers)
//! cargo +nightly fuzz run tokenizer -- -max_total_time=120 -timeout=20
//! ```

#![no_main]

use std::path::Path;

use forebay_engine::chat::ChatTemplate;
use forebay_engine::internals::format::gguf;
use forebay_engine::tokenizer::Tokenizer;
use libfuzzer_sys::fuzz_target;

mod common;

fuzz_target!(|file: &[u8]| {
    let path = Path::new("fuzz.gguf");
    let Ok(model) = gguf::parse(path, &mut &*file, file.len() as u64) else { return };
    if let Ok(tokenizer) = Tokenizer::from_metadata(path, &model.metadata) {
        common::check(&tokenizer);
        let _ = ChatTemplate::from_metadata(path, &model.metadata, &tokenizer);
    }
});
