//! Any `tokenizer.json` gives either a working tokenizer or an error. Run, from the root of the repository:
//!
//! ```text
//! (cd fuzz && cargo run --example seed_tokenizers)
//! cargo +nightly fuzz run tokenizer_json -- -max_total_time=120 -timeout=20
//! ```
//!
//! A zero byte ends the file; `tokenizer_config.json` follows it.

#![no_main]

use std::sync::LazyLock;

use forebay_engine::chat::ChatTemplate;
use forebay_engine::tokenizer::Tokenizer;
use libfuzzer_sys::fuzz_target;

mod common;

static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));

fuzz_target!(|files: &[u8]| {
    let folder = FOLDER.path();
    let mut files = files.splitn(2, |&byte| byte == 0);
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::write(folder.join(name), files.next().unwrap_or(b"{}")).expect("a file is written");
    }
    if let Ok(tokenizer) = Tokenizer::from_folder(folder) {
        common::check(&tokenizer);
    }
    let _ = ChatTemplate::from_folder(folder);
});
