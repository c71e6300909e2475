//! Inputs that the fuzz targets found: each is an error or works, and never causes a panic.

use std::path::Path;

use forebay_engine::chat::{ChatTemplate, Message, RenderOptions};
use forebay_engine::internals::format::gguf;
use forebay_engine::tokenizer::{EncodeOptions, Tokenizer};

/// Runs `check` on every input of a fuzz target.
fn each(target: &str, check: impl Fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/regressions").join(target);
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        check(&std::fs::read(entry.unwrap().path()).unwrap());
        seen += 1;
    }
    assert!(seen > 0);
}

#[test]
fn templates() {
    each("template", |source| {
        let Ok(template) = ChatTemplate::new(std::str::from_utf8(source).unwrap(), &[]) else { return };
        for messages in [&[][..], &[Message::new("user", "a")]] {
            let _ = template.render(messages, &RenderOptions::default());
        }
    });
}

#[test]
fn tokenizers_in_metadata() {
    each("tokenizer", |file| {
        let path = Path::new("regression.gguf");
        let Ok(model) = gguf::parse(path, &mut &*file, file.len() as u64) else { return };
        if let Ok(tokenizer) = Tokenizer::from_metadata(path, &model.metadata) {
            let _ = tokenizer.encode("ab é 12", EncodeOptions::default());
            let _ = ChatTemplate::from_metadata(path, &model.metadata, &tokenizer);
        }
    });
}
