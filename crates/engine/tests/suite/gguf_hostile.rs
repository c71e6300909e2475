//! Damaged headers never cause a panic of the parser, nor allocations much larger than their files.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use forebay_engine::internals::format::{ModelFile, gguf};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::common::gguf_builder::{GgufBuilder, sample, string, tensor_type, value_type};
use crate::common::memory::measure;
use crate::common::mutate::mutate;

const MUTATIONS: usize = 10_000;

/// What the parser may allocate beyond the size of the header.
const SLACK: usize = 8 << 20;

#[test]
fn mutations_of_a_small_file_are_harmless() {
    let file = sample().build();
    let model = parse(&file, file.len() as u64).unwrap();
    mutate_headers(&file[..data_start(&model)], file.len() as u64, 1);
}

#[test]
fn mutations_of_a_real_header_are_harmless() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tales-qwen3moe-Q4_K_M.gguf");
    let model = ModelFile::open(&path).unwrap();
    let mut header = vec![0; data_start(&model)];
    File::open(&path).unwrap().read_exact(&mut header).unwrap();
    mutate_headers(&header, model.bytes(), 2);
}

/// Lengths and counts that fit the claimed file length, but not the header.
#[test]
fn claimed_lengths_allocate_nothing_in_advance() {
    let claim = 100u64 << 20;
    for (name, builder) in [
        ("text", GgufBuilder::new().raw("k", value_type::STRING, claim.to_le_bytes())),
        ("bytes", GgufBuilder::new().array("k", value_type::U8, claim, [])),
        ("numbers", GgufBuilder::new().array("k", value_type::U64, claim / 8, [])),
        ("texts", GgufBuilder::new().array("k", value_type::STRING, claim / 8, string(b"a"))),
        ("entries", GgufBuilder::new().claim_entries(gguf::MAX_METADATA_ENTRIES)),
        ("tensors", GgufBuilder::new().claim_tensors(gguf::MAX_TENSORS)),
    ] {
        let file = builder.build();
        let (result, memory) = measure(|| parse(&file, 1 << 40));
        assert!(result.is_err(), "{name}");
        assert!(memory.peak < 1 << 20, "{name}: {memory:?}");
    }
}

/// The most entries and tensors, each as small as possible: the worst ratio of memory to file size.
#[test]
fn the_most_entries_take_bounded_memory() {
    let mut builder = GgufBuilder::new().alignment(1);
    for i in 1..gguf::MAX_METADATA_ENTRIES {
        builder = builder.bool(&format!("{i:x}"), 1);
    }
    for i in 0..gguf::MAX_TENSORS {
        builder = builder.tensor(format!("{i:x}"), tensor_type::F32, &[1], 4);
    }
    let file = builder.build();
    let (model, memory) = measure(|| parse(&file, file.len() as u64));
    assert_eq!(model.unwrap().tensors.len() as u64, gguf::MAX_TENSORS);
    assert!(memory.peak < 24 << 20, "{memory:?} for a file of {}", file.len());
}

/// A large vocabulary, which is most of a real header.
#[test]
fn a_large_vocabulary_takes_its_own_size() {
    let tokens: Vec<String> = (0..300_000).map(|i| format!("token number {i}")).collect();
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let file = GgufBuilder::new().strings("tokenizer.ggml.tokens", &tokens).build();
    let (model, memory) = measure(|| parse(&file, file.len() as u64));
    assert!(model.is_ok());
    assert!(memory.kept < file.len() + 4096, "{memory:?} for a file of {}", file.len());
    // While a vector grows, its old and new memory coexist.
    assert!(memory.peak < 2 * file.len() + SLACK, "{memory:?} for a file of {}", file.len());
}

fn parse(header: &[u8], len: u64) -> forebay_engine::Result<ModelFile> {
    gguf::parse(Path::new("hostile.gguf"), &mut &*header, len)
}

fn data_start(model: &ModelFile) -> usize {
    model.tensors.iter().map(|t| t.offset).min().unwrap() as usize
}

/// Parses many damaged copies of `header`, with a claimed file length of `len` bytes.
fn mutate_headers(header: &[u8], len: u64, seed: u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut copy = Vec::new();
    let mut refused = 0;
    for round in 0..MUTATIONS {
        copy.clear();
        copy.extend_from_slice(header);
        for _ in 0..1 + rng.next_u32() % 3 {
            mutate(&mut copy, &mut rng);
        }
        // Half of the files are as long as the original, half end with the header.
        let len = if rng.next_u32().is_multiple_of(2) { len } else { copy.len() as u64 };
        let (result, memory) = measure(|| parse(&copy, len));
        assert!(
            memory.peak <= copy.len() + SLACK && memory.largest <= copy.len() + SLACK / 2,
            "round {round} of seed {seed}: {memory:?} for a header of {}",
            copy.len()
        );
        match result {
            Ok(model) => assert_sound(&model, len),
            Err(error) => {
                refused += 1;
                assert!(error.to_string().len() < 1000, "round {round} of seed {seed}: {error}");
            }
        }
    }
    assert!(refused > MUTATIONS / 4, "only {refused} of {MUTATIONS} mutations did any damage");
}

/// Checks what all users of a parsed file rely on.
fn assert_sound(model: &ModelFile, len: u64) {
    for tensor in &model.tensors {
        assert!(tensor.offset.checked_add(tensor.len).unwrap() <= len);
        assert!(tensor.elements() > 0 && (1..=4).contains(&tensor.shape.len()));
        assert_eq!(model.tensor(&tensor.name), Some(tensor));
    }
}
