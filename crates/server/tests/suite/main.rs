//! The server without connections, through its public interface.

mod answers;
mod in_process;

use std::path::Path;

use forebay_engine::{Engine, Options};

/// The demo model, on one thread.
fn engine() -> Engine {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tales-qwen3moe-Q4_K_M.gguf");
    Engine::open(&path, &Options::new().threads(1)).unwrap()
}
