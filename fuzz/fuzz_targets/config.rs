//! Any text is either valid settings of a model or an error: `config.json` with the tensors of a valid model. Run, from
//! the root of the repository:
//!
//! ```text
//! tools/golden unpack
//! for f in qwen3moe qwen3moe-mlx qwen3moe-fp8; do
//!     mkdir -p fuzz/corpus/config && cp crates/engine/tests/data/golden/$f/config.json fuzz/corpus/config/$f
//! done
//! cargo +nightly fuzz run config -- -malloc_limit_mb=64 -max_total_time=120
//! ```

#![no_main]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use forebay_engine::internals::format::{ModelFile, folder, parse_object};
use forebay_engine::internals::models::describe;
use libfuzzer_sys::fuzz_target;

/// One folder for each kind of weights, with copies of the valid files.
static FOLDERS: LazyLock<Vec<PathBuf>> = LazyLock::new(|| {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/engine/tests/data/golden");
    let temporary = std::env::temp_dir().join(format!("forebay-fuzz-{}", std::process::id()));
    let folders = ["qwen3moe", "qwen3moe-mlx", "qwen3moe-fp8"].map(|name| {
        let to = temporary.join(name);
        fs::create_dir_all(&to).expect("a folder for temporary files");
        for entry in fs::read_dir(golden.join(name)).expect("the folders that tools/golden unpack makes") {
            let from = entry.expect("an entry").path();
            if from.to_string_lossy().contains("safetensors") {
                fs::copy(&from, to.join(from.file_name().expect("a file"))).expect("a copy");
            }
        }
        to
    });
    folders.into()
});

fuzz_target!(|text: &[u8]| {
    let path = Path::new("config.json");
    if let Ok(object) = parse_object(path, text) {
        let _ = folder::config_metadata(path, object);
    }
    let _ = folder::parse_index(path, text);
    for folder in FOLDERS.iter() {
        fs::write(folder.join("config.json"), text).expect("the folder can be written to");
        if let Ok(model) = ModelFile::open(folder) {
            model.parameters();
            let _ = describe(&model).map(|blueprint| blueprint.scratch_bytes(512));
        }
    }
});
