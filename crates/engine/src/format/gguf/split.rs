//! Split models: finds the other parts of a model next to the named one, and joins them.

use std::fmt;
use std::io;
use std::path::Path;

use super::MAX_TENSORS;
use crate::error::{Error, Result};
use crate::format::{FileIdx, ModelFile, Quoted, TensorInfo, UnknownTensor};

const INDEX_KEY: &str = "split.no";
const COUNT_KEY: &str = "split.count";
const TENSORS_KEY: &str = "split.tensors.count";
const ARCHITECTURE_KEY: &str = "general.architecture";

/// Returns `named` if it is a whole model; otherwise joins it with the other parts, which `load` reads.
pub(super) fn complete(named: ModelFile, load: impl Fn(&Path) -> Result<ModelFile>) -> Result<ModelFile> {
    let path = named.path().to_owned();
    let (place, name) = match (SplitPosition::in_metadata(&named)?, PartName::of(&path)) {
        (None, Some(name)) if name.place.count > 1 => {
            let message = format!("it is named as {}, but it has no {COUNT_KEY}", name.place);
            return Err(Error::format(&path, message));
        }
        (None, _) => return Ok(named),
        (Some(place), None) => {
            let suffix = place.suffix();
            let message =
                format!("it is {place}, but is not named NAME{suffix}, so the other parts cannot be found");
            return Err(Error::format(&path, message));
        }
        (Some(place), Some(name)) => (place, name),
    };
    if place != name.place {
        let message = format!("it is named as {}, but its header says that it is {place}", name.place);
        return Err(Error::format(&path, message));
    }

    let mut named = Some(named);
    let mut part = |index: u64| match named.take_if(|_| index == place.index) {
        Some(part) => Ok(part),
        None => load_sibling(&path, &name, index, &load),
    };
    // The first part has the model's metadata; the others repeat some of it.
    let mut joined = part(0)?;
    for index in 1..place.count {
        append(&mut joined, part(index)?)?;
    }
    check_tensor_count(&joined)?;
    let unknown = joined.unknown;
    let model = ModelFile::new(joined.format, joined.files, joined.metadata, joined.tensors)?;
    Ok(ModelFile { unknown, ..model })
}

/// The index and the number of parts. Metadata counts parts from zero, file names and messages from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SplitPosition {
    index: u64,
    count: u64,
}

impl SplitPosition {
    /// The position in a file's metadata; `None` if the file is a whole model.
    fn in_metadata(part: &ModelFile) -> Result<Option<SplitPosition>> {
        let count = integer(part, COUNT_KEY)?.unwrap_or(0);
        let index = integer(part, INDEX_KEY)?.unwrap_or(0);
        // Tools that merge parts leave a count of zero.
        let count = count.max(1);
        if index >= count {
            let message =
                format!("{INDEX_KEY} is {index}, but {COUNT_KEY} says that there are {count} parts");
            return Err(Error::format(part.path(), message));
        }
        Ok((count > 1).then_some(SplitPosition { index, count }))
    }

    /// The ending of this part's file name.
    fn suffix(self) -> String {
        format!("-{:05}-of-{:05}.gguf", self.index + 1, self.count)
    }
}

impl fmt::Display for SplitPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "part {} of {} of a split model", self.index + 1, self.count)
    }
}

/// The components of a part's file name.
#[derive(Debug, PartialEq, Eq)]
struct PartName {
    base: String,
    place: SplitPosition,
}

impl PartName {
    fn of(path: &Path) -> Option<PartName> {
        let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (base, number) = rest.rsplit_once('-')?;
        let (number, count) = (five_digits(number)?, five_digits(count)?);
        let in_range = (1..=count).contains(&number);
        in_range
            .then(|| PartName { base: base.to_owned(), place: SplitPosition { index: number - 1, count } })
    }
}

fn five_digits(text: &str) -> Option<u64> {
    let all_digits = text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    if all_digits { text.parse().ok() } else { None }
}

/// Reads part `index` of the model that has another part at `path`.
fn load_sibling(
    path: &Path,
    name: &PartName,
    index: u64,
    load: &impl Fn(&Path) -> Result<ModelFile>,
) -> Result<ModelFile> {
    let expected = SplitPosition { index, ..name.place };
    let path = path.with_file_name(name.base.clone() + &expected.suffix());
    let part = load(&path).map_err(|error| match error {
        Error::Io { path, source, .. } if source.kind() == io::ErrorKind::NotFound => {
            Error::io(&path, format!("cannot open {expected} (download all of them into one folder)"), source)
        }
        other => other,
    })?;
    match SplitPosition::in_metadata(&part)? {
        Some(place) if place == expected => Ok(part),
        Some(place) => Err(Error::format(
            &path,
            format!("it should be {expected}, but its header says that it is {place}"),
        )),
        None => Err(Error::format(&path, format!("it should be {expected}, but it has no {COUNT_KEY}"))),
    }
}

/// Appends the next part to the parts before it.
fn append(joined: &mut ModelFile, part: ModelFile) -> Result<()> {
    if let (Some(first), Some(own)) =
        (joined.metadata.str(ARCHITECTURE_KEY), part.metadata.str(ARCHITECTURE_KEY))
        && first != own
    {
        let (first, own) = (Quoted(first), Quoted(own));
        let message = format!("its {ARCHITECTURE_KEY} is {own}, but the first part has {first}");
        return Err(Error::format(part.path(), message));
    }
    let total = integer(joined, TENSORS_KEY)?;
    let own_total = integer(&part, TENSORS_KEY)?;
    if let (Some(total), Some(own_total)) = (total, own_total)
        && total != own_total
    {
        let message = format!("its {TENSORS_KEY} is {own_total}, but the first part has {total}");
        return Err(Error::format(part.path(), message));
    }
    let tensors = tensor_count(joined) + tensor_count(&part);
    if tensors > MAX_TENSORS {
        let message =
            format!("with this part the model has {tensors} tensors, more than the limit of {MAX_TENSORS}");
        return Err(Error::format(part.path(), message));
    }

    let file = FileIdx(joined.files.len());
    joined.files.extend(part.files);
    joined.tensors.extend(part.tensors.into_iter().map(|tensor| TensorInfo { file, ..tensor }));
    joined.unknown.extend(part.unknown.into_iter().map(|tensor| UnknownTensor { file, ..tensor }));
    Ok(())
}

/// Compares the number of tensors with the number in the first part.
fn check_tensor_count(joined: &ModelFile) -> Result<()> {
    let found = tensor_count(joined);
    match integer(joined, TENSORS_KEY)? {
        Some(total) if total == found => Ok(()),
        Some(total) => {
            let message =
                format!("{TENSORS_KEY} is {total}, but its {} parts have {found}", joined.files.len());
            Err(Error::format(joined.path(), message))
        }
        None => Err(Error::format(
            joined.path(),
            format!("it is part of a split model, but has no {TENSORS_KEY}"),
        )),
    }
}

fn tensor_count(part: &ModelFile) -> u64 {
    (part.tensors.len() + part.unknown.len()) as u64
}

fn integer(part: &ModelFile, key: &str) -> Result<Option<u64>> {
    let Some(value) = part.metadata.get(key) else { return Ok(None) };
    match value.as_u64() {
        Some(number) => Ok(Some(number)),
        None => Err(Error::format(part.path(), format!("{key} is not a whole number"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_recognised_by_its_name() {
        let name = PartName::of(Path::new("/models/a-of-b-00002-of-00010.gguf")).unwrap();
        assert_eq!(name, PartName { base: "a-of-b".into(), place: SplitPosition { index: 1, count: 10 } });
        assert_eq!(name.place.suffix(), "-00002-of-00010.gguf");
    }

    #[test]
    fn other_names_are_not_parts() {
        for name in [
            "a.gguf",
            "a-1-of-2.gguf",
            "a-00001-of-00002",
            "a-00000-of-00002.gguf",
            "a-00003-of-00002.gguf",
            "a-+0001-of-00002.gguf",
        ] {
            assert_eq!(PartName::of(Path::new(name)), None, "{name}");
        }
    }
}
