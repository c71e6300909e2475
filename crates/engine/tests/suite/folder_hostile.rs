//! Damaged folders never cause a panic, nor allocations much larger than their files.

use std::path::Path;

use forebay_engine::internals::format::{FileIdx, folder, safetensors};
use forebay_engine::{Engine, Options, Precision, Result, TokenId};
use forebay_testing::golden;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde_json::{Map, Value, json};

use crate::common::folder_builder::Folder;
use crate::common::memory::measure;
use crate::common::mutate::mutate;

/// The start of a safetensors file, up to the end of its header.
fn header(path: &Path) -> (Vec<u8>, u64) {
    let bytes = std::fs::read(path).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (bytes[..8 + len].to_vec(), bytes.len() as u64)
}

#[test]
fn mutated_safetensors_headers_are_harmless() {
    const MUTATIONS: usize = 10_000;
    /// What the parser may allocate beyond the size of the header.
    const SLACK: usize = 4 << 20;
    let headers = [
        header(&golden("qwen3moe/model.safetensors")),
        header(&golden("qwen3moe-mlx/model-00001-of-00002.safetensors")),
        header(&golden("qwen3moe-fp8/model.safetensors")),
    ];
    let mut rng = ChaCha8Rng::seed_from_u64(21);
    let mut refused = 0;
    for round in 0..MUTATIONS {
        let (sound, len) = &headers[round % headers.len()];
        let mut copy = sound.clone();
        for _ in 0..1 + rng.next_u32() % 3 {
            if rng.next_u32().is_multiple_of(2) {
                mutate(&mut copy, &mut rng)
            } else {
                mutate_json(&mut copy, &mut rng)
            }
        }
        // Half of the files are as long as the whole one, half end with the header. In half of them the length of the
        // header is corrected, so that the damage gets past this check.
        let len = if rng.next_u32().is_multiple_of(2) { *len } else { copy.len() as u64 };
        if rng.next_u32().is_multiple_of(2) && copy.len() >= 8 {
            let right = (copy.len() as u64 - 8).to_le_bytes();
            copy[..8].copy_from_slice(&right);
        }
        let path = Path::new("hostile.safetensors");
        let (result, memory) = measure(|| safetensors::parse(path, &mut &*copy, len, FileIdx(0)));
        assert!(memory.peak <= 8 * copy.len() + SLACK, "round {round}: {memory:?} for {} bytes", copy.len());
        match result {
            Ok(header) => {
                for t in &header.tensors {
                    assert!(t.offset.checked_add(t.len).unwrap() <= len);
                    assert_eq!(t.dtype.row_bytes(t.elements() as usize), Some(t.len as usize));
                }
            }
            Err(error) => {
                refused += 1;
                assert!(error.to_string().len() < 1000, "round {round}: {error}");
            }
        }
    }
    assert!(refused > MUTATIONS / 4, "only {refused} of {MUTATIONS} mutations did any damage");
}

/// Changes a number or a character in a text, which breaks JSON less often than other mutations.
fn mutate_json(bytes: &mut Vec<u8>, rng: &mut ChaCha8Rng) {
    let digits: Vec<usize> = (8..bytes.len()).filter(|&i| bytes[i].is_ascii_digit()).collect();
    if digits.is_empty() {
        return;
    }
    let at = digits[rng.next_u32() as usize % digits.len()];
    match rng.next_u32() % 4 {
        0 => bytes[at] = b'0' + (rng.next_u32() % 10) as u8,
        1 => drop(bytes.splice(at..at, *b"99999999999")),
        2 => drop(bytes.splice(at..at + 1, *b"18446744073709551615")),
        _ => drop(bytes.splice(at..at, *b"-")),
    }
}

/// Opens a model and, if that succeeds, computes a few tokens.
fn run(path: &Path, precision: Precision) -> Result<()> {
    let options = Options::default().threads(1).chunk(8).precision(precision);
    let engine = Engine::open(path, &options)?;
    let prompt = [TokenId(0), TokenId(engine.vocab_size() as u32 - 1), TokenId(0)];
    let mut session = engine.session();
    session.extend(&prompt[..prompt.len().min(engine.context())])?;
    assert_eq!(session.logits().len(), engine.vocab_size());
    Ok(())
}

#[test]
fn mutated_settings_are_refused_or_run() {
    const MUTATIONS: usize = 5_000;
    /// What a tiny model may allocate, including its tokenizer.
    const MOST: usize = 64 << 20;
    let sound = ["qwen3moe", "qwen3moe-fp8"].map(|name| Folder::read(&golden(name)));
    let temporary = tempfile::tempdir().unwrap();
    let paths = [0, 1].map(|i| temporary.path().join(i.to_string()));
    for (folder, path) in sound.iter().zip(&paths) {
        folder.write(path);
        run(path, Precision::Fast).unwrap();
    }
    let mut rng = ChaCha8Rng::seed_from_u64(22);
    let (mut refused, mut ran) = (0, 0);
    for round in 0..MUTATIONS {
        let (folder, path) = (&sound[round % 2], &paths[round % 2]);
        let mut config = folder.config.clone();
        for _ in 0..1 + rng.next_u32() % 2 {
            change_setting(&mut config, &mut rng);
        }
        let mut text = Value::Object(config).to_string().into_bytes();
        if rng.next_u32().is_multiple_of(4) {
            mutate(&mut text, &mut rng);
        }
        std::fs::write(path.join("config.json"), &text).unwrap();
        let precision = if round % 4 < 2 { Precision::Fast } else { Precision::Exact };
        let (result, memory) = measure(|| run(path, precision));
        assert!(memory.peak <= MOST, "round {round}: {memory:?}");
        match result {
            Ok(()) => ran += 1,
            Err(error) => {
                refused += 1;
                let message = error.to_string();
                assert!(message.len() < 1000, "round {round}: {message}");
            }
        }
    }
    assert!(refused > MUTATIONS / 4 && ran > MUTATIONS / 20, "{refused} refused, {ran} ran");
}

/// Sets a setting, at any depth, to a value that no model has, or removes it.
fn change_setting(object: &mut Map<String, Value>, rng: &mut ChaCha8Rng) {
    if object.is_empty() {
        return;
    }
    let key = object.keys().nth(rng.next_u32() as usize % object.len()).unwrap().clone();
    if let Some(inner) = object[&key].as_object_mut().filter(|_| !rng.next_u32().is_multiple_of(4)) {
        return change_setting(inner, rng);
    }
    let values = [
        json!(0),
        json!(1),
        json!(2),
        json!(7),
        json!(-1),
        json!(0.5),
        json!(1e308),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(1u64 << 30),
        json!((1u64 << 30) - 1),
        json!(65_537),
        json!("text"),
        json!(true),
        json!(null),
        json!([]),
        json!([1, 2, 3]),
        json!(["a", 1, { "b": null }]),
        json!({ "bits": 4, "group_size": 64, "quant_method": "fp8", "rope_type": "yarn" }),
    ];
    match values.get(rng.next_u32() as usize % (values.len() + 1)) {
        Some(value) => drop(object.insert(key, value.clone())),
        None => drop(object.remove(&key)),
    }
}

#[test]
fn mutated_indexes_are_harmless() {
    let sound = std::fs::read(golden("qwen3moe-mlx/model.safetensors.index.json")).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(23);
    for _ in 0..2_000 {
        let mut copy = sound.clone();
        for _ in 0..1 + rng.next_u32() % 3 {
            mutate(&mut copy, &mut rng);
        }
        if let Ok(names) = folder::parse_index(Path::new("index.json"), &copy) {
            assert!(names.iter().all(|name| !name.contains('/') && name != ".."));
        }
    }
}
