//! Finds out which tensors a GGUF file with given settings must have. No family lists them: it describes a file
//! without tensors, each tensor that it does not find is added, and so on until it finds all.

use std::path::Path;

use super::{Builder, Config, recognise};
use crate::error::{Error, Result};
use crate::format::gguf::MAX_TENSORS;
use crate::format::{Metadata, ModelFile};

/// A tensor that a model must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// Its name.
    pub name: String,
    /// Its shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// Its use.
    pub kind: NeedKind,
}

/// The use of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NeedKind {
    /// One or several matrices, of any supported type.
    Matrix,
    /// Numbers, of a float type.
    Vector,
}

/// The state of a discovery.
pub(super) struct Discovery<'a> {
    /// Rows of the embedding table, which no setting has.
    pub vocabulary: usize,
    /// Whether an optional tensor should exist.
    pub optional: &'a dyn Fn(&str) -> bool,
    /// The first declared tensor that does not exist.
    pub missing: Option<Need>,
}

/// The tensors of a GGUF file with these settings, in the order in which the family declares them. `optional` decides
/// for each optional tensor whether it should exist; `path` is only used in messages.
///
/// # Errors
/// If the family is unknown, or the settings are incomplete or inconsistent.
pub fn needs(
    path: &Path,
    settings: Metadata,
    vocabulary: usize,
    optional: &dyn Fn(&str) -> bool,
) -> Result<Vec<Need>> {
    let mut file = ModelFile::without_tensors(path, settings);
    let arch = recognise(&file)?;
    let mut needs = Vec::new();
    loop {
        let config = Config::new(&file);
        let mut builder = Builder::discovering(&file, Discovery { vocabulary, optional, missing: None });
        let described = arch.model(&config, &mut builder);
        let Some(need) = builder.into_missing() else { return described.map(|_| needs) };
        if needs.len() as u64 == MAX_TENSORS {
            return Err(Error::format(path, format!("the model would have more than {MAX_TENSORS} tensors")));
        }
        file.imagine(&need.name, &need.shape)?;
        needs.push(need);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::describe;

    /// The tensors of each tiny test model are those that its settings need, given its optional ones.
    #[test]
    fn a_file_has_the_tensors_that_its_settings_need() {
        let files = forebay_testing::golden_files();
        let mut families = std::collections::HashSet::new();
        for path in files.filter(|path| path.extension().is_some_and(|e| e == "gguf")) {
            let file = ModelFile::open(&path).unwrap();
            describe(&file).unwrap();
            let embedding = file.tensor("token_embd.weight").unwrap();
            let vocabulary = embedding.shape[0];
            let has = |name: &str| file.tensor(name).is_some();
            let needs = needs(&path, file.metadata.clone(), vocabulary, &has).unwrap();
            for need in &needs {
                let tensor =
                    file.tensor(&need.name).unwrap_or_else(|| panic!("{}: {need:?}", path.display()));
                // Only the tensor tells whether a gate has a number for each head or for each channel.
                let gate = need.name.ends_with(".attn_gate.weight");
                let wider = gate && tensor.shape[0].is_multiple_of(need.shape[0]);
                // A vector may be stored as a matrix with one row.
                let row = tensor.shape.strip_prefix(&[1]) == Some(&need.shape[..]);
                assert!(tensor.shape == need.shape || wider || row, "{}: {need:?}", path.display());
                let norm = need.name.contains("norm");
                assert!(!norm || need.kind == NeedKind::Vector, "{need:?}");
                assert!(!need.name.contains("_exps.weight") || need.kind == NeedKind::Matrix, "{need:?}");
            }
            assert_eq!(needs.len(), file.tensors.len(), "{}", path.display());
            families.insert(file.architecture().unwrap().to_owned());
        }
        assert_eq!(families.len(), crate::models::ARCHS.len());
    }
}
