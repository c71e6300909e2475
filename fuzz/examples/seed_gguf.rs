//! Writes the initial inputs of the target `gguf` into its corpus.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

#[allow(dead_code, reason = "the engine's tests use the rest")]
#[path = "../../crates/engine/tests/common/gguf_builder.rs"]
mod gguf_builder;

use gguf_builder::{GgufBuilder, sample};

fn main() -> io::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let corpus = root.join("corpus/gguf");
    fs::create_dir_all(&corpus)?;
    fs::write(corpus.join("sample"), sample().build())?;
    fs::write(corpus.join("version_2"), sample().version(2).build())?;
    fs::write(corpus.join("aligned"), sample().alignment(64).build())?;
    fs::write(corpus.join("part"), sample().u16("split.no", 1).u16("split.count", 3).build())?;
    fs::write(corpus.join("vocabulary"), GgufBuilder::new().strings("tokens", &["a", "é"]).build())?;

    // The first settings of a real file; its vocabulary would only slow down the search.
    let mut head = Vec::new();
    File::open(root.join("../models/tales-qwen3moe-Q4_K_M.gguf"))?.take(4096).read_to_end(&mut head)?;
    fs::write(corpus.join("real_head"), head)
}
