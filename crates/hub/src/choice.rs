//! Which files of a repository make a model, and which model is meant.

use std::collections::BTreeMap;
use std::path::Path;

use forebay_engine::Bytes;

/// What a model of safetensors files is called where others are called by their quantisation.
const FOLDER: &str = "safetensors";

/// What is taken when nobody says, best first: small enough to stream, good enough to talk to.
const PREFERRED: [&str; 10] =
    ["Q4_K_M", "UD-Q4_K_XL", "Q4_K_XL", "MXFP4", "MXFP4_MOE", "Q4_K_S", "IQ4_XS", "Q4_0", "Q5_K_M", "Q8_0"];

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// With `/` between folders.
    pub name: String,
    /// Its size.
    pub bytes: u64,
}

/// A model in a repository.
#[derive(Clone, Debug)]
pub struct Variant {
    /// How it is asked for: its quantisation.
    pub label: String,
    /// In the order of their names.
    pub files: Vec<File>,
    /// Parts that its files' names promise and that are not there.
    pub missing: usize,
    /// Whether it is a folder of safetensors files.
    pub folder: bool,
}

impl Variant {
    /// The size of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// What is to be opened, in the folder that has the files.
    pub fn entry(&self) -> &str {
        if self.folder { "" } else { &self.files[0].name }
    }

    /// Its label and size, for lists.
    pub fn describe(&self) -> String {
        format!("{} ({})", self.label, Bytes(self.bytes()))
    }
}

/// Why no model was chosen.
pub enum Undecided {
    /// There is none at all.
    Empty,
    /// None is called so.
    Unknown,
    /// Several could be meant: these, of all there are.
    Several(Vec<String>),
}

/// The models that files make: each GGUF file or set of parts is one, and so are the safetensors files.
pub fn variants(files: &[File]) -> Vec<Variant> {
    let mut sets: BTreeMap<(&str, &str, usize), Vec<File>> = BTreeMap::new();
    for file in files {
        let (folder, name) = file.name.rsplit_once('/').unwrap_or(("", &file.name));
        let Some(stem) = name.strip_suffix(".gguf") else { continue };
        // Companions of models: what sees pictures, and statistics for quantising.
        if name.starts_with("mmproj") || name.contains("imatrix") {
            continue;
        }
        let (stem, count) = match part(stem) {
            Some((stem, _, count)) => (stem, count),
            None => (stem, 1),
        };
        sets.entry((folder, stem, count)).or_default().push(file.clone());
    }
    let mut found: Vec<(&str, Variant)> = sets
        .into_iter()
        .map(|((folder, stem, count), mut files)| {
            files.sort_by(|a, b| a.name.cmp(&b.name));
            let label =
                quantisation(stem).or_else(|| quantisation(folder)).unwrap_or_else(|| stem.to_owned());
            let missing = count.saturating_sub(files.len());
            (stem, Variant { label, files, missing, folder: false })
        })
        .collect();
    // Models of the same quantisation are told apart by their whole names.
    let labels: Vec<String> = found.iter().map(|(_, v)| v.label.to_ascii_lowercase()).collect();
    for (i, (stem, variant)) in found.iter_mut().enumerate() {
        if labels.iter().filter(|label| **label == labels[i]).count() > 1 {
            variant.label = (*stem).to_owned();
        }
    }
    let mut found: Vec<Variant> = found.into_iter().map(|(_, variant)| variant).collect();
    found.sort_by_key(Variant::bytes);
    found.extend(folder_variant(files));
    found
}

/// The one that is meant, by what was said of it.
pub fn choose<'a>(variants: &'a [Variant], quant: Option<&str>) -> Result<&'a Variant, Undecided> {
    let Some(quant) = quant else { return choose_default(variants) };
    let is_label = |v: &Variant| v.label.eq_ignore_ascii_case(quant);
    let is_name = |v: &Variant| v.files.iter().any(|file| is_in_path(&file.name, quant));
    let is_word = |v: &Variant| has_word(&v.files[0].name, quant);
    let ways: [&dyn Fn(&Variant) -> bool; 3] = [&is_label, &is_name, &is_word];
    for way in ways {
        let meant: Vec<&Variant> = variants.iter().filter(|v| way(v)).collect();
        match meant[..] {
            [] => {}
            [one] => return Ok(one),
            _ => return Err(Undecided::Several(meant.iter().map(|v| v.describe()).collect())),
        }
    }
    Err(if variants.is_empty() { Undecided::Empty } else { Undecided::Unknown })
}

/// All there are, with their sizes.
pub fn list(variants: &[Variant]) -> String {
    variants.iter().map(Variant::describe).collect::<Vec<_>>().join(", ")
}

/// The name of a part of a model, its number and the number of parts: `x-00002-of-00005` is the second of five of `x`.
fn part(stem: &str) -> Option<(&str, usize, usize)> {
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let digits = |s: &str| s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
    if !digits(number) || !digits(count) {
        return None;
    }
    Some((stem, number.parse().ok()?, count.parse().ok()?))
}

/// The model whose weights are in safetensors files beside its settings. What lies in folders below is a copy.
fn folder_variant(files: &[File]) -> Option<Variant> {
    let at_top = |file: &&File| !file.name.contains('/');
    let extension = |file: &File| Path::new(&file.name).extension()?.to_str().map(str::to_owned);
    let has = |name: &str| files.iter().any(|file| file.name == name);
    let is_weights = |file: &File| extension(file).as_deref() == Some("safetensors");
    let sharded = has("model.safetensors.index.json") || has("model.safetensors");
    let mut chosen: Vec<File> = Vec::new();
    let (mut weights, mut promised) = (0, 0);
    for file in files.iter().filter(at_top) {
        if is_weights(file) {
            // Some repositories have the same weights again, as their authors' own programs want them.
            if sharded && !file.name.starts_with("model") {
                continue;
            }
            weights += 1;
            let stem = file.name.trim_end_matches(".safetensors");
            promised = promised.max(part(stem).map_or(1, |(_, _, count)| count));
        } else if !matches!(extension(file).as_deref(), Some("json" | "jinja" | "txt" | "model" | "tiktoken"))
        {
            continue;
        }
        chosen.push(file.clone());
    }
    let found = weights > 0 && has("config.json");
    chosen.sort_by(|a, b| a.name.cmp(&b.name));
    found.then(|| Variant {
        label: FOLDER.to_owned(),
        files: chosen,
        missing: promised.saturating_sub(weights),
        folder: true,
    })
}

fn choose_default(variants: &[Variant]) -> Result<&Variant, Undecided> {
    let files: Vec<&Variant> = variants.iter().filter(|v| !v.folder).collect();
    match (&files[..], variants) {
        ([only], _) => return Ok(only),
        ([], [folder]) => return Ok(folder),
        ([], _) => return Err(Undecided::Empty),
        _ => {}
    }
    let preferred =
        PREFERRED.iter().find_map(|name| files.iter().find(|v| v.label.eq_ignore_ascii_case(name)));
    let all = || files.iter().map(|v| v.describe()).collect();
    preferred.copied().ok_or_else(|| Undecided::Several(all()))
}

/// The quantisation that a name says: `Model-UD-Q4_K_XL` says `UD-Q4_K_XL`.
fn quantisation(name: &str) -> Option<String> {
    let words: Vec<&str> = name.split(['-', '.', '/']).collect();
    let at = words.iter().rposition(|word| is_type(&word.to_ascii_uppercase()))?;
    let dynamic = at > 0 && words[at - 1].eq_ignore_ascii_case("UD");
    Some(if dynamic { format!("{}-{}", words[at - 1], words[at]) } else { words[at].to_owned() })
}

fn is_type(word: &str) -> bool {
    let known = ["F16", "BF16", "F32", "FP16", "FP32", "FP8", "MXFP4", "MXFP4_MOE", "NVFP4"];
    let bits = ["IQ", "TQ", "Q"].iter().find_map(|kind| word.strip_prefix(kind));
    known.contains(&word) || bits.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// Whether a path, or one of the names in it, is this.
fn is_in_path(path: &str, name: &str) -> bool {
    let is = |s: &str| s.eq_ignore_ascii_case(name) || s.trim_end_matches(".gguf").eq_ignore_ascii_case(name);
    is(path) || path.split('/').any(is)
}

/// Whether a name has this as a word: what `_` joins is one word.
fn has_word(name: &str, word: &str) -> bool {
    let (name, word) = (name.to_ascii_lowercase(), word.to_ascii_lowercase());
    let ends = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric() && c != '_');
    name.match_indices(&word)
        .any(|(at, _)| ends(name[..at].chars().next_back()) && ends(name[at + word.len()..].chars().next()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Vec<File> {
        names.iter().map(|name| File { name: (*name).to_owned(), bytes: 10 }).collect()
    }

    fn labels(names: &[&str]) -> Vec<String> {
        let mut labels: Vec<_> = variants(&files(names)).into_iter().map(|v| v.label).collect();
        labels.sort();
        labels
    }

    fn chosen(names: &[&str], quant: &str) -> Option<String> {
        choose(&variants(&files(names)), Some(quant)).ok().map(|v| v.files[0].name.clone())
    }

    #[test]
    fn models_are_called_by_their_quantisation() {
        assert_eq!(
            labels(&[
                "M-30B-A3B-Q4_K_M.gguf",
                "m.IQ2_XXS.gguf",
                "ggml-q8_0.gguf",
                "M-UD-Q4_K_XL.gguf",
                "m-mxfp4.gguf"
            ]),
            ["IQ2_XXS", "Q4_K_M", "UD-Q4_K_XL", "mxfp4", "q8_0"]
        );
        assert_eq!(labels(&["BF16/M-00001-of-00002.gguf", "BF16/M-00002-of-00002.gguf"]), ["BF16"]);
        assert_eq!(labels(&["a-Q8_0.gguf", "b-Q8_0.gguf"]), ["a-Q8_0", "b-Q8_0"]);
        assert_eq!(labels(&["plain.gguf", "mmproj-F16.gguf", "imatrix.gguf", "README.md"]), ["plain"]);
    }

    #[test]
    fn parts_are_one_model_and_missing_ones_are_counted() {
        let all = variants(&files(&["M-Q4_K_M-00003-of-00003.gguf", "M-Q4_K_M-00001-of-00003.gguf"]));
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].missing, all[0].entry(), all[0].bytes()), (1, "M-Q4_K_M-00001-of-00003.gguf", 20));
    }

    #[test]
    fn a_quantisation_is_found_in_any_case_in_a_name_or_as_a_folder() {
        let names = ["M-Q4_K_M.gguf", "M-Q4_K_S.gguf", "M-UD-Q4_K_XL.gguf", "big/M-F16-00001-of-00001.gguf"];
        assert_eq!(chosen(&names, "q4_k_m").as_deref(), Some("M-Q4_K_M.gguf"));
        assert_eq!(chosen(&names, "Q4_K_XL").as_deref(), Some("M-UD-Q4_K_XL.gguf"));
        assert_eq!(chosen(&names, "big").as_deref(), Some("big/M-F16-00001-of-00001.gguf"));
        assert_eq!(chosen(&names, "M-Q4_K_S.gguf").as_deref(), Some("M-Q4_K_S.gguf"));
        // Neither a beginning of a quantisation nor what all have in common decides.
        assert_eq!(chosen(&names, "Q4_K"), None);
        assert_eq!(chosen(&names, "M"), None);
        let two = variants(&files(&names));
        assert!(matches!(choose(&two, Some("M")), Err(Undecided::Several(all)) if all.len() == 4));
    }

    #[test]
    fn without_a_wish_the_usual_one_is_taken() {
        let default = |names: &[&str]| choose(&variants(&files(names)), None).ok().map(|v| v.label.clone());
        assert_eq!(default(&["a-Q8_0.gguf", "a-Q4_K_M.gguf", "a-F16.gguf"]).as_deref(), Some("Q4_K_M"));
        assert_eq!(default(&["a-F16.gguf"]).as_deref(), Some("F16"));
        assert_eq!(default(&["a-F16.gguf", "a-F32.gguf"]), None);
        assert_eq!(default(&["config.json", "model.safetensors", "a-F16.gguf"]).as_deref(), Some("F16"));
        assert_eq!(default(&["README.md"]), None);
    }

    #[test]
    fn a_folder_has_weights_and_settings_and_nothing_twice() {
        let all = variants(&files(&[
            "config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "merges.txt",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "consolidated.safetensors",
            "pytorch_model.bin",
            "original/model.safetensors",
            "README.md",
            "weights.pth",
        ]));
        assert_eq!(all.len(), 1);
        assert!(all[0].folder && all[0].missing == 0 && all[0].entry().is_empty());
        let names: Vec<_> = all[0].files.iter().map(|f| f.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "chat_template.jinja",
                "config.json",
                "merges.txt",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
                "tokenizer.json"
            ]
        );
    }
}
