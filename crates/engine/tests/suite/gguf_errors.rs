//! Each way in which a GGUF file can be wrong has its own message, which names the file and the place.

use std::fs;
use std::io;
use std::path::Path;

use forebay_engine::Error;
use forebay_engine::internals::format::{ModelFile, gguf};

use crate::common::gguf_builder::{GgufBuilder, sample, string, tensor_type, value_type};

/// The error of parsing `file` as a file of `len` bytes.
fn error_of_length(file: &[u8], len: u64) -> Error {
    let error = gguf::parse(Path::new("bad.gguf"), &mut &*file, len).unwrap_err();
    assert!(error.to_string().starts_with("bad.gguf: "), "{error}");
    error
}

#[track_caller]
fn assert_damaged(file: &[u8], parts: &[&str]) {
    let error = error_of_length(file, file.len() as u64);
    assert!(matches!(error, Error::Format { .. }), "{error:?}");
    assert_says(&error, parts);
}

#[track_caller]
fn assert_unsupported(file: &[u8], parts: &[&str]) {
    let error = error_of_length(file, file.len() as u64);
    assert!(matches!(error, Error::Unsupported(_)), "{error:?}");
    assert_says(&error, parts);
}

#[track_caller]
fn assert_says(error: &Error, parts: &[&str]) {
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
}

fn builder() -> GgufBuilder {
    GgufBuilder::new()
}

#[test]
fn an_empty_file() {
    assert_damaged(b"", &["the file is empty"]);
}

#[test]
fn other_kinds_of_file() {
    assert_damaged(b"\x7fELF\x02\x01\x01", &["not a GGUF file", "7f 45 4c 46"]);
    assert_damaged(b"version https://git-lfs.example/spec/v1\n", &["not a GGUF file", "Git LFS pointer"]);
    assert_damaged(b"<!doctype html>", &["not a GGUF file", "web page"]);
    assert_damaged(b"\x10\0\0\0\0\0\0\0{\"a\":{}}", &["not a GGUF file", "safetensors"]);
}

#[test]
fn other_versions() {
    assert_unsupported(&builder().version(1).build(), &["GGUF version 1"]);
    assert_unsupported(&builder().version(4).build(), &["GGUF version 4", "2 and 3"]);
    assert_unsupported(&builder().version(0).build(), &["GGUF version 0"]);
    assert_unsupported(&builder().version(3u32.swap_bytes()).build(), &["big-endian"]);
}

#[test]
fn a_truncated_file_names_the_value_and_the_offset() {
    let file = sample().build();
    assert_damaged(&file[..2], &["truncated while reading the magic number", "offset 0", "has 2 bytes"]);
    assert_damaged(&file[..6], &["truncated while reading the version", "offset 4"]);
    assert_damaged(&file[..20], &["truncated while reading the number of metadata entries", "offset 16"]);
    let cut = builder().str("a", "b").build();
    assert_damaged(&cut[..cut.len() - 2], &["the length of the value of \"a\"", "offset 37"]);
}

#[test]
fn every_shorter_file_is_refused() {
    let file = sample().build();
    let whole = gguf::parse(Path::new("whole.gguf"), &mut &*file, file.len() as u64).unwrap();
    let data_start = whole.tensors.iter().map(|t| t.offset).min().unwrap() as usize;
    for len in 0..file.len() {
        error_of_length(&file[..len], len as u64);
    }
    // A file that shrinks after its length was read. The last bytes before the data are padding.
    for len in 0..=data_start - 32 {
        error_of_length(&file[..len], file.len() as u64);
    }
}

#[test]
fn a_text_past_the_end() {
    let mut file = builder().str("general.name", "x").build();
    file[24..32].copy_from_slice(&1000u64.to_le_bytes());
    assert_damaged(&file, &["the key of metadata entry 0 at offset 24", "1000 bytes long", "only 25 more"]);

    let length = u64::MAX.to_le_bytes();
    let file = builder().raw("general.name", value_type::STRING, length).build();
    assert_damaged(
        &file,
        &["the value of \"general.name\"", "18446744073709551615 bytes long", "only 0 more"],
    );

    let file =
        builder().array("list", value_type::STRING, 2, [string(b"a"), length.to_vec()].concat()).build();
    assert_damaged(&file, &["element 1 of \"list\"", "18446744073709551615"]);
}

#[test]
fn counts_that_the_file_cannot_hold() {
    let file = builder().u32("a", 1).claim_entries(2).build();
    assert_damaged(&file, &["2 metadata entries", "last 17 bytes cannot hold"]);
    let file = builder().u32("a", 1).claim_tensors(3).build();
    assert_damaged(&file, &["3 tensors", "last 17 bytes cannot hold"]);
    for count in [5, u64::MAX / 4, u64::MAX] {
        let file = builder().array("a", value_type::U32, count, [0; 16]).build();
        assert_damaged(&file, &["the array \"a\"", &format!("{count} elements"), "last 16 bytes"]);
    }
    let file = builder().array("a", value_type::STRING, 3, [0; 16]).build();
    assert_damaged(&file, &["the array \"a\"", "3 elements", "last 16 bytes"]);
}

#[test]
fn counts_above_the_limits() {
    let file = builder().claim_entries(gguf::MAX_METADATA_ENTRIES + 1).build();
    let error = error_of_length(&file, 1 << 40);
    assert_says(&error, &["65537 metadata entries", "limit of 65536"]);
    let file = builder().claim_tensors(u64::MAX).build();
    let error = error_of_length(&file, 1 << 40);
    assert_says(&error, &["18446744073709551615 tensors", "limit of 65536"]);
}

#[test]
fn a_header_as_large_as_the_weights() {
    let file = builder().raw("blob", value_type::STRING, (300u64 << 30).to_le_bytes()).build();
    let error = error_of_length(&file, 400 << 30);
    assert_says(&error, &["the header is larger than 134217728 bytes", "the value of \"blob\""]);
}

#[test]
fn arrays_of_arrays() {
    let file = builder().array("nested", value_type::ARRAY, 1, [0; 64]).build();
    assert_unsupported(&file, &["\"nested\" is an array of arrays"]);
}

#[test]
fn unknown_value_types() {
    assert_damaged(
        &builder().raw("k", 13, [0; 8]).build(),
        &["\"k\" has the unknown value type 13", "offset 33"],
    );
    let file = builder().array("list", 99, 0, []).build();
    assert_damaged(&file, &["\"list\" has the unknown value type 99"]);
}

#[test]
fn booleans_other_than_0_and_1() {
    assert_damaged(&builder().bool("flag", 2).build(), &["\"flag\"", "byte 2", "boolean"]);
    let file = builder().array("flags", value_type::BOOL, 3, [0, 1, 255]).build();
    assert_damaged(&file, &["\"flags\"", "byte 255", "boolean"]);
}

#[test]
fn text_that_is_not_utf8() {
    let bad = string(b"\xff\xfe");
    let file = builder().raw(b"\xc3", value_type::U8, [0]).build();
    assert_damaged(&file, &["the key of metadata entry 0 at offset 24 is not UTF-8"]);
    let file = builder().raw("name", value_type::STRING, &bad).build();
    assert_damaged(&file, &["the value of \"name\"", "is not UTF-8"]);
    let file = builder().array("tokens", value_type::STRING, 2, [string(b"a"), bad].concat()).build();
    assert_damaged(&file, &["element 1 of \"tokens\"", "is not UTF-8"]);
    let file = builder().tensor(b"\xff", tensor_type::F32, &[1], 4).build();
    assert_damaged(&file, &["the name of tensor 0", "is not UTF-8"]);
}

#[test]
fn repeated_names() {
    let file = builder().u32("a", 1).u32("b", 2).u32("a", 1).build();
    assert_damaged(&file, &["the metadata key \"a\"", "offset 58", "a second time"]);
    let file =
        builder().tensor("t", tensor_type::F32, &[1], 4).tensor("t", tensor_type::F32, &[1], 4).build();
    assert_damaged(&file, &["the tensor name \"t\" appears a second time"]);
}

#[test]
fn empty_and_overlong_names() {
    assert_damaged(&builder().u32("", 1).build(), &["the key of metadata entry 0 at offset 24 is empty"]);
    let file = builder().u32(&"k".repeat(65_536), 1).build();
    assert_damaged(&file, &["the key of metadata entry 0", "65536 bytes long", "limit of 65535"]);
    let file = builder().tensor("", tensor_type::F32, &[1], 4).build();
    assert_damaged(&file, &["the name of tensor 0 at offset 24 is empty"]);
    let file = builder().tensor("n".repeat(256), tensor_type::F32, &[1], 4).build();
    assert_damaged(&file, &["the name of tensor 0", "256 bytes long", "limit of 255"]);
}

#[test]
fn shapes_that_no_tensor_has() {
    let with_dims = |dims: &[u64]| builder().tensor("t", tensor_type::F32, dims, 4).build();
    assert_damaged(&with_dims(&[]), &["tensor \"t\" has 0 dimensions"]);
    assert_damaged(&with_dims(&[1; 5]), &["tensor \"t\" has 5 dimensions", "1 to 4"]);
    assert_damaged(&with_dims(&[1, 0]), &["tensor \"t\" has a dimension of size 0"]);
    assert_damaged(&with_dims(&[1 << 32, 1 << 32]), &["tensor \"t\" has more elements than can be counted"]);
    assert_damaged(&with_dims(&[1 << 62]), &["tensor \"t\" has more bytes than can be counted"]);
    assert_damaged(&with_dims(&[1 << 31, 1 << 31]), &["tensor \"t\" has more bytes than can be counted"]);
}

#[test]
fn rows_that_are_not_whole_blocks() {
    let file = builder().tensor("t", tensor_type::Q4_K, &[128, 2], 144).build();
    assert_damaged(&file, &["tensor \"t\"", "rows of 128 elements", "256 in a block of Q4_K"]);
}

#[test]
fn tensor_types_that_do_not_exist() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.gguf");
    let assert_refused = |id: u32, parts: &[&str]| {
        let file = builder().tensor("t", id, &[256, 3], 256).build();
        fs::write(&path, &file).unwrap();
        let error = ModelFile::open(&path).unwrap_err();
        assert!(matches!(error, Error::Unsupported(_)), "{error:?}");
        assert_says(&error, parts);
        // The file can be listed anyway.
        let model = ModelFile::survey(&path).unwrap();
        let [tensor] = &model.unknown[..] else { panic!("{:?}", model.unknown) };
        assert_eq!((tensor.name.as_str(), tensor.type_id, &tensor.shape[..]), ("t", id, &[3, 256][..]));
        assert_eq!((tensor.offset, model.parameters()), (file.len() as u64 - 256, 768));
    };
    assert_refused(31, &["bad.gguf: tensor \"t\" has the type 31 (Q4_0_4_4)", "removed"]);
    assert_refused(4, &["tensor \"t\" has the type 4 (Q4_2)", "removed"]);
    assert_refused(4_000_000_000, &["tensor \"t\" has the type 4000000000", "unknown"]);
    let file = builder().tensor("t", 99, &[1 << 32, 1 << 32], 4).build();
    assert_damaged(&file, &["tensor \"t\" has more elements than can be counted"]);
}

#[test]
fn invalid_alignments() {
    for alignment in [0, 3, 48, 1 << 25] {
        let file = builder().u32("general.alignment", alignment).build();
        assert_damaged(&file, &["general.alignment", &format!("is {alignment}"), "power of two"]);
    }
    let file = builder().str("general.alignment", "32").build();
    assert_damaged(&file, &["general.alignment is not a whole number"]);
}

#[test]
fn offsets_that_are_not_aligned() {
    let file = builder().tensor("t", tensor_type::F32, &[1], 64).at(16).build();
    assert_damaged(&file, &["tensor \"t\" has the offset 16", "alignment 32"]);
}

#[test]
fn data_past_the_end() {
    let file = builder()
        .tensor("a", tensor_type::F32, &[8], 32)
        .tensor("b", tensor_type::F32, &[8], 32)
        .tensor("c", tensor_type::F32, &[8], 32)
        .build();
    let (have, need) = (file.len() - 40, file.len());
    let says = [format!("has {have} bytes and needs {need}"), "tensor \"b\" takes 32 bytes".into()];
    assert_damaged(&file[..have], &[&says[0], &says[1], "incomplete"]);

    let file = builder().tensor("far", tensor_type::F32, &[8], 32).at(1 << 40).build();
    assert_damaged(&file, &["incomplete", "tensor \"far\"", "1099511627"]);
    let file = builder().tensor("far", tensor_type::F32, &[8], 32).at(u64::MAX - 31).build();
    assert_damaged(&file, &["tensor \"far\"", "beyond the largest possible file"]);
}

#[test]
fn tensors_that_overlap() {
    let file = builder()
        .tensor("second", tensor_type::F32, &[8], 128)
        .at(32)
        .tensor("first", tensor_type::F32, &[9], 36)
        .at(0)
        .build();
    assert_damaged(&file, &["tensors \"first\" and \"second\" overlap", "36 bytes"]);
    let same =
        builder().tensor("a", tensor_type::F32, &[8], 32).tensor("b", tensor_type::F32, &[8], 32).at(0);
    assert_damaged(&same.build(), &["overlap"]);
}

#[test]
fn paths_that_are_not_files() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing.gguf");
    for (path, kind) in [(&*missing, io::ErrorKind::NotFound), (folder.path(), io::ErrorKind::IsADirectory)] {
        match gguf::open(path) {
            Err(Error::Io { path: named, source, .. }) => {
                assert_eq!(named, path);
                assert_eq!(source.kind(), kind);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn an_error_names_the_file_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, b"GGML").unwrap();
    let error = ModelFile::open(&path).unwrap_err();
    assert_says(&error, &[path.to_str().unwrap(), "not a GGUF file"]);
}
