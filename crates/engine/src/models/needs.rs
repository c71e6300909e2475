//! Which tensors a GGUF file of given settings must have. No family lists them: it is asked to describe a file that has
//! none, and each tensor that it misses is added, until it misses nothing.

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
    /// What it is used as.
    pub kind: NeedKind,
}

/// What a tensor is used as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NeedKind {
    /// One matrix or several: of any type that can be computed.
    Matrix,
    /// Numbers by themselves: of a float type.
    Vector,
}

/// What is known while tensors are being found out.
pub(super) struct Discovery<'a> {
    /// Rows of the table of embeddings, which is in no setting.
    pub vocabulary: usize,
    /// Whether a tensor that a family can do without shall be there.
    pub optional: &'a dyn Fn(&str) -> bool,
    /// The first tensor that was asked for and is not there.
    pub missing: Option<Need>,
}

/// The tensors of a GGUF file with these settings, in the order in which the family asks for them. `optional` says of
/// tensors that a family can do without whether they shall be there; `path` only names the file in messages.
///
/// # Errors
/// If the family is unknown, or the settings are incomplete or do not fit each other.
pub fn needs(
    path: &Path,
    settings: Metadata,
    vocabulary: usize,
    optional: &dyn Fn(&str) -> bool,
) -> Result<Vec<Need>> {
    let mut file = ModelFile::without_tensors(path, settings);
    let describe = recognise(&file)?.describe;
    let mut needs = Vec::new();
    loop {
        let config = Config::new(&file);
        let mut builder = Builder::discovering(&file, Discovery { vocabulary, optional, missing: None });
        let described = describe(&config, &mut builder).and_then(|_| config.context());
        let Some(need) = builder.into_missing() else { return described.map(|_| needs) };
        if needs.len() as u64 == MAX_TENSORS {
            return Err(Error::format(path, format!("it would have more than {MAX_TENSORS} tensors")));
        }
        file.imagine(&need.name, &need.shape)?;
        needs.push(need);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::describe;

    /// The tensors that each tiny model has are those that its settings need, with what it chose to have.
    #[test]
    fn a_file_has_the_tensors_that_its_settings_need() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden");
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
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
                assert_eq!(tensor.shape, need.shape, "{}: {need:?}", path.display());
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
