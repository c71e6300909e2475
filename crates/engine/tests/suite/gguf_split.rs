//! A split model opens from any of its parts, and only if all parts are present and consistent.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use forebay_engine::Error;
use forebay_engine::internals::format::{FileIdx, ModelFile};
use tempfile::TempDir;

use crate::common::gguf_builder::{GgufBuilder, tensor_type};

fn path_of(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("tiny-00{number:03}-of-00003.gguf"))
}

/// The keys that a splitter writes for part `index` of three, which have five tensors together.
fn part(index: u16) -> GgufBuilder {
    GgufBuilder::new().u16("split.no", index).u16("split.count", 3).i32("split.tensors.count", 5)
}

fn tensor(part: GgufBuilder, name: &str) -> GgufBuilder {
    part.tensor(name, tensor_type::F32, &[8, 2], 64)
}

/// A valid model: only metadata in the first part, as some splitters do, then three and two tensors.
fn parts() -> [GgufBuilder; 3] {
    let first = part(0).str("general.architecture", "qwen3moe").str("general.name", "tiny");
    let second = ["a", "b", "c"].into_iter().fold(part(1), tensor);
    let third = ["d", "e"].into_iter().fold(part(2), tensor);
    [first, second, third]
}

fn write(parts: &[GgufBuilder; 3]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (i, part) in parts.iter().enumerate() {
        fs::write(path_of(folder.path(), i + 1), part.build()).unwrap();
    }
    folder
}

/// Replaces one part of the valid model and checks why the model does not open, whichever part is named.
#[track_caller]
fn assert_refused(number: usize, replacement: GgufBuilder, parts_of_message: &[&str]) {
    let mut parts = parts();
    parts[number - 1] = replacement;
    let folder = write(&parts);
    for named in 1..=3 {
        let error = ModelFile::open(&path_of(folder.path(), named)).unwrap_err();
        assert!(matches!(error, Error::Format { .. }), "{error:?}");
        assert_says(&error, parts_of_message);
    }
}

#[track_caller]
fn assert_says(error: &Error, parts: &[&str]) {
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
}

#[test]
fn any_part_opens_the_whole() {
    let folder = write(&parts());
    for named in 1..=3 {
        let model = ModelFile::open(&path_of(folder.path(), named)).unwrap();
        assert_eq!(model.path(), path_of(folder.path(), 1));
        assert_eq!(model.metadata.str("general.name"), Some("tiny"));
        let places: Vec<_> = model.tensors.iter().map(|t| (t.name.as_str(), t.file.0)).collect();
        assert_eq!(places, [("a", 1), ("b", 1), ("c", 1), ("d", 2), ("e", 2)]);
        assert_eq!(model.tensor("e").unwrap().file, FileIdx(2));
        for (i, file) in model.files.iter().enumerate() {
            assert_eq!(file.path, path_of(folder.path(), i + 1));
            assert_eq!(file.len, fs::metadata(&file.path).unwrap().len());
        }
    }
}

/// Download caches store files by their hashes and give them names by links.
#[cfg(unix)]
#[test]
fn parts_behind_links_open() {
    let blobs = write(&parts());
    let names = tempfile::tempdir().unwrap();
    for number in 1..=3 {
        let blob = blobs.path().join(format!("blob{number}"));
        fs::rename(path_of(blobs.path(), number), &blob).unwrap();
        std::os::unix::fs::symlink(&blob, path_of(names.path(), number)).unwrap();
    }
    assert_eq!(ModelFile::open(&path_of(names.path(), 2)).unwrap().tensors.len(), 5);
}

#[test]
fn a_missing_part_is_named() {
    for missing in 1..=3 {
        let folder = write(&parts());
        fs::remove_file(path_of(folder.path(), missing)).unwrap();
        for named in (1..=3).filter(|&n| n != missing) {
            let error = ModelFile::open(&path_of(folder.path(), named)).unwrap_err();
            match &error {
                Error::Io { path, source, .. } => {
                    assert_eq!(*path, path_of(folder.path(), missing));
                    assert_eq!(source.kind(), io::ErrorKind::NotFound);
                }
                other => panic!("{other:?}"),
            }
            assert_says(&error, &[&format!("cannot open part {missing} of 3 of a split model")]);
        }
    }
}

#[test]
fn swapped_parts_are_refused() {
    let [first, second, third] = parts();
    let folder = write(&[first, third, second]);
    for named in 1..=3 {
        let error = ModelFile::open(&path_of(folder.path(), named)).unwrap_err();
        assert_says(&error, &["part 2 of 3", "part 3 of 3", "its header says"]);
    }
}

#[test]
fn a_part_of_another_split_is_refused() {
    let other = GgufBuilder::new().u16("split.no", 1).u16("split.count", 4).i32("split.tensors.count", 5);
    assert_refused(2, other, &["part 2 of 3", "part 2 of 4", "its header says"]);
}

#[test]
fn a_part_without_split_keys_is_refused() {
    assert_refused(3, tensor(GgufBuilder::new(), "d"), &["part 3 of 3", "has no split.count"]);
}

#[test]
fn parts_of_different_architectures_are_refused() {
    let other = part(1).str("general.architecture", "llama");
    assert_refused(2, other, &["general.architecture is \"llama\"", "first part has \"qwen3moe\""]);
}

#[test]
fn a_wrong_number_of_tensors_is_refused() {
    let [_, second, _] = parts();
    assert_refused(2, tensor(second, "extra"), &["split.tensors.count is 5", "3 parts have 6"]);
}

#[test]
fn parts_that_disagree_on_the_number_of_tensors_are_refused() {
    let other = GgufBuilder::new().u16("split.no", 1).u16("split.count", 3).i32("split.tensors.count", 6);
    assert_refused(2, other, &["split.tensors.count is 6", "first part has 5"]);
}

#[test]
fn a_split_without_a_number_of_tensors_is_refused() {
    let first = GgufBuilder::new().u16("split.no", 0).u16("split.count", 3);
    assert_refused(1, first, &["has no split.tensors.count"]);
}

#[test]
fn a_tensor_in_two_parts_is_refused() {
    let third = tensor(tensor(part(2), "a"), "e");
    assert_refused(3, third, &["00003-of-00003.gguf: the tensor \"a\" is also in", "00002-of-00003.gguf"]);
}

#[test]
fn invalid_split_numbers_are_refused() {
    let text = GgufBuilder::new().u16("split.no", 1).str("split.count", "three");
    assert_refused(2, text, &["split.count is not a whole number"]);
    let negative = GgufBuilder::new().i32("split.no", -1).u16("split.count", 3);
    assert_refused(2, negative, &["split.no is not a whole number"]);
    let beyond = GgufBuilder::new().u16("split.no", 3).u16("split.count", 3);
    assert_refused(2, beyond, &["split.no is 3", "3 parts"]);
}

#[test]
fn a_renamed_part_is_refused() {
    let folder = write(&parts());
    let renamed = folder.path().join("renamed.gguf");
    fs::rename(path_of(folder.path(), 2), &renamed).unwrap();
    let error = ModelFile::open(&renamed).unwrap_err();
    assert_says(&error, &["renamed.gguf", "part 2 of 3", "NAME-00002-of-00003.gguf"]);
}

#[test]
fn merged_files_are_whole() {
    let folder = tempfile::tempdir().unwrap();
    for (name, merged) in [
        ("merged.gguf", GgufBuilder::new().u16("split.no", 0).u16("split.count", 0)),
        ("one-00001-of-00001.gguf", GgufBuilder::new().u16("split.no", 0).u16("split.count", 1)),
        ("plain-00001-of-00001.gguf", GgufBuilder::new()),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, tensor(merged, "a").build()).unwrap();
        assert_eq!(ModelFile::open(&path).unwrap().tensors.len(), 1, "{name}");
    }
}

#[test]
fn parts_may_differ_in_alignment() {
    let mut parts = parts();
    parts[1] = ["a", "b", "c"].into_iter().fold(part(1).alignment(128), tensor);
    let folder = write(&parts);
    let model = ModelFile::open(&path_of(folder.path(), 1)).unwrap();
    assert_eq!(model.tensor("b").unwrap().offset % 128, 0);
}
