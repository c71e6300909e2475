//! Valid GGUF files, built here and real ones, are parsed into their tensors and metadata.

use std::fs;
use std::path::{Path, PathBuf};

use forebay_engine::internals::format::{FileIdx, ModelFile, NumberKind, TensorInfo, Value, gguf};
use forebay_kernels::DType;
use forebay_testing::shared;

use crate::common::gguf_builder::{GgufBuilder, sample, tensor_type};

fn parse(file: &[u8]) -> ModelFile {
    gguf::parse(Path::new("test.gguf"), &mut &*file, file.len() as u64).unwrap()
}

/// The bytes of a tensor.
fn data<'a>(file: &'a [u8], tensor: &TensorInfo) -> &'a [u8] {
    &file[tensor.offset as usize..][..tensor.len as usize]
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn a_file_becomes_a_directory() {
    let file = sample().build();
    let model = parse(&file);
    assert_eq!(model.path(), Path::new("test.gguf"));
    assert_eq!(model.bytes(), file.len() as u64);
    assert_eq!(model.tensors.len(), 3);

    let experts = model.tensor("blk.0.ffn_up_exps.weight").unwrap();
    assert_eq!(experts.dtype, DType::Q4_K);
    assert_eq!(experts.shape, [2, 3, 256], "the outermost dimension comes first");
    assert_eq!(experts.elements(), 1536);
    assert_eq!(experts.file, FileIdx(0));
    for tensor in &model.tensors {
        assert_eq!(tensor.offset % 32, 0);
        let expected: Vec<u8> = (0..tensor.len).map(|i| i as u8).collect();
        assert_eq!(data(&file, tensor), expected, "{}", tensor.name);
    }
    assert!(model.tensor("absent").is_none());
}

#[test]
fn metadata_keeps_its_types_and_order() {
    let model = parse(&sample().build());
    let metadata = &model.metadata;
    assert_eq!(metadata.str("general.architecture"), Some("qwen3moe"));
    assert_eq!(metadata.get("qwen3moe.block_count"), Some(&Value::Unsigned(2)));
    assert_eq!(metadata.get("qwen3moe.offset"), Some(&Value::Signed(-7)));
    assert_eq!(metadata.get("qwen3moe.rope.freq_base"), Some(&Value::Float(10_000.0)));
    assert_eq!(metadata.get("tokenizer.ggml.add_bos_token"), Some(&Value::Bool(true)));
    assert_eq!(metadata.get("general.size"), Some(&Value::Unsigned(1 << 40)));

    let tokens = metadata.get("tokenizer.ggml.tokens").and_then(Value::as_strings).unwrap();
    assert_eq!(tokens.iter().collect::<Vec<_>>(), ["<s>", "", "grüße", "a b"]);
    assert!(metadata.get("tokenizer.ggml.merges").and_then(Value::as_strings).unwrap().is_empty());
    let types = metadata.get("tokenizer.ggml.token_type").and_then(Value::as_numbers).unwrap();
    assert_eq!(types.kind(), NumberKind::I32);
    assert_eq!(types.iter().collect::<Vec<_>>(), [1, -2, 3, 4].map(Value::Signed));
    let flags = metadata.get("qwen3moe.flags").and_then(Value::as_numbers).unwrap();
    assert_eq!(flags.iter().collect::<Vec<_>>(), [true, false, true].map(Value::Bool));

    let keys: Vec<&str> = metadata.iter().map(|(key, _)| key).collect();
    assert_eq!(keys[..2], ["general.architecture", "qwen3moe.block_count"]);
}

#[test]
fn version_2_reads_like_version_3() {
    let (two, three) = (parse(&sample().version(2).build()), parse(&sample().build()));
    assert_eq!(two.tensors, three.tensors);
    assert!(two.metadata.iter().eq(three.metadata.iter()));
}

#[test]
fn any_power_of_two_aligns() {
    for alignment in [1, 2, 8, 32, 64, 4096] {
        let file = GgufBuilder::new()
            .alignment(alignment)
            .tensor("a", tensor_type::F32, &[3], 12)
            .tensor("b", tensor_type::F32, &[1, 1, 1, 1], 4)
            .build();
        let model = parse(&file);
        assert_eq!(data(&file, &model.tensors[0]), (0..12).collect::<Vec<u8>>(), "alignment {alignment}");
        assert_eq!(data(&file, &model.tensors[1]), [0, 1, 2, 3], "alignment {alignment}");
        assert_eq!(model.tensors[1].shape, [1, 1, 1, 1]);
    }
}

#[test]
fn tensors_may_lie_in_any_order_with_gaps() {
    let file = GgufBuilder::new()
        .tensor("late", tensor_type::F32, &[8], 32)
        .at(96)
        .tensor("early", tensor_type::F32, &[8], 128)
        .at(0)
        .build();
    let model = parse(&file);
    assert_eq!(model.tensors[0].offset - model.tensors[1].offset, 96);
}

#[test]
fn a_vocabulary_needs_no_tensors() {
    let model = parse(&GgufBuilder::new().strings("tokenizer.ggml.tokens", &["a"]).build());
    assert!(model.tensors.is_empty());
    assert!(parse(&GgufBuilder::new().build()).metadata.is_empty());
}

#[test]
fn a_type_that_cannot_be_computed_is_still_listed() {
    let model = parse(&GgufBuilder::new().tensor("a", tensor_type::F64, &[2], 16).build());
    assert_eq!(model.tensors[0].dtype, DType::F64);
}

#[test]
fn the_data_is_never_read() {
    let file = sample().build();
    let data_start = parse(&file).tensors.iter().map(|t| t.offset).min().unwrap() as usize;
    let header = &file[..data_start];
    gguf::parse(Path::new("test.gguf"), &mut &*header, file.len() as u64).unwrap();
}

#[test]
fn the_demo_model_opens() {
    let model = ModelFile::open(&repository().join("models/tales-qwen3moe-Q4_K_M.gguf")).unwrap();
    assert_eq!(model.metadata.str("general.architecture"), Some("qwen3moe"));
    assert_eq!(model.tensor("token_embd.weight").unwrap().shape.len(), 2);
    assert_eq!(model.tensor("blk.0.ffn_up_exps.weight").unwrap().shape.len(), 3);
}

/// Some machines have real files of many architectures, made by the reference tools, next to the checkout.
#[test]
fn real_files_open() {
    let mut opened = 0;
    for folder in ["golden", "vocab"] {
        let Some(folder) = shared(folder) else { continue };
        let before = opened;
        for path in fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.extension().is_some_and(|extension| extension == "gguf") {
                let model = ModelFile::open(&path).unwrap();
                assert!(model.metadata.str("general.architecture").is_some(), "{}", path.display());
                opened += 1;
            }
        }
        assert!(opened > before, "{} holds no file", folder.display());
    }
}
