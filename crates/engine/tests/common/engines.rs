//! Engines that generate text, loaded once for all tests of a program.

use std::sync::LazyLock;

use forebay_engine::{Engine, Options};

use super::models;
use super::tiny_model::tiny_model;

/// The beginning of the stories in tests.
pub const STORY: &str = "Once upon a time there was a little girl";

/// The demo model, which writes stories.
pub static DEMO: LazyLock<Engine> = LazyLock::new(|| {
    let options = Options::default().threads(2).chunk(16);
    Engine::open(&models::demo_model(), &options).unwrap()
});

/// A random model with the tokens a, b, c, d, space and full stop. A logit bias determines what it generates.
pub static TINY: LazyLock<Engine> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    std::fs::write(&path, tiny_model(32).build()).unwrap();
    Engine::open(&path, &Options::default().threads(1)).unwrap()
});
