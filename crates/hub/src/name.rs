//! What a model on the hub is called: `OWNER/NAME`, or `OWNER/NAME:QUANT`; or its address there, as a browser shows it.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, failure};

/// A repository, and which of the models in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelName {
    /// `OWNER/NAME`.
    pub repo: String,
    /// How its weights are quantised, or another part of a file's name.
    pub quant: Option<String>,
}

impl FromStr for ModelName {
    type Err = Error;

    fn from_str(s: &str) -> Result<ModelName, Error> {
        let (repo, quant) = match address(s) {
            Some(address) => address,
            None => match s.split_once(':') {
                Some((repo, quant)) => (repo, Some(quant)),
                None => (s, None),
            },
        };
        let sound = repo.split_once('/').is_some_and(|(owner, name)| is_word(owner) && is_word(name));
        if !sound || !quant.is_none_or(|quant| quant.split('/').all(is_word)) {
            return Err(failure!(
                "expected OWNER/NAME, OWNER/NAME:QUANT or the address of a model on huggingface.co"
            ));
        }
        Ok(ModelName { repo: repo.to_owned(), quant: quant.map(str::to_owned) })
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repo)?;
        self.quant.iter().try_for_each(|quant| write!(f, ":{quant}"))
    }
}

/// Whether a text starts with the hub's address, with or without `https://`.
pub fn is_address(s: &str) -> bool {
    below_hub(s).is_some()
}

/// What follows the hub's address.
fn below_hub(s: &str) -> Option<&str> {
    let s = ["https://", "http://"].iter().find_map(|scheme| s.strip_prefix(scheme)).unwrap_or(s);
    ["huggingface.co/", "www.huggingface.co/", "hf.co/"].iter().find_map(|host| s.strip_prefix(host))
}

/// The repository of an address, and which of the models in it: `hf.co/OWNER/NAME:QUANT`, or the page of a repository, of a
/// folder in it or of a file.
fn address(s: &str) -> Option<(&str, Option<&str>)> {
    let path = below_hub(s)?.split(['?', '#']).next()?.trim_end_matches('/');
    let Some(at) = path.match_indices('/').nth(1).map(|(at, _)| at) else {
        return Some(match path.split_once(':') {
            Some((repo, quant)) => (repo, Some(quant)),
            None => (path, None),
        });
    };
    let (repo, rest) = (&path[..at], &path[at + 1..]);
    let mut parts = rest.splitn(3, '/');
    match (parts.next()?, parts.next(), parts.next()) {
        // The second part is the version, a branch such as main.
        ("tree" | "blob" | "resolve", Some(_), file) => {
            Some((repo, file.map(|file| file.strip_suffix(".gguf").unwrap_or(file))))
        }
        _ => None,
    }
}

/// What the hub allows in names, so that none leads out of a folder.
fn is_word(s: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    s.bytes().all(allowed) && s.starts_with(|c: char| c.is_ascii_alphanumeric())
}

/// Whether a part of a path is a file's name on every system. On Windows a colon follows the letter of a drive or precedes
/// the name of a stream, dots and spaces at the end are dropped, and some names are those of devices, with any ending.
/// Downloads move between machines, so such a name is refused on all of them.
pub fn is_portable(part: &str) -> bool {
    const DEVICES: [&str; 6] = ["CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"];
    let stem = part.split('.').next().unwrap_or_default().trim_end_matches(' ').to_ascii_uppercase();
    let numbered = ["COM", "LPT"]
        .iter()
        .filter_map(|port| stem.strip_prefix(port))
        .any(|number| matches!(number.chars().collect::<Vec<_>>()[..], ['0'..='9' | '¹' | '²' | '³']));
    let is_device = numbered || DEVICES.contains(&stem.as_str());
    !is_device && !part.ends_with(['.', ' ']) && !part.contains(|c: char| c == ':' || c.is_control())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_an_owner_a_name_and_perhaps_a_quantisation() {
        let name: ModelName = "someone/Some-Model.v2-GGUF:UD-Q4_K_XL".parse().unwrap();
        assert_eq!(name.repo, "someone/Some-Model.v2-GGUF");
        assert_eq!(name.quant.as_deref(), Some("UD-Q4_K_XL"));
        assert_eq!(name.to_string(), "someone/Some-Model.v2-GGUF:UD-Q4_K_XL");
        assert_eq!("a/b".parse::<ModelName>().unwrap().quant, None);
    }

    #[test]
    fn addresses_are_understood_as_they_are_copied() {
        let read = |s: &str| s.parse::<ModelName>().map(|name| name.to_string()).unwrap_or_default();
        for (address, name) in [
            ("hf.co/a/b:Q4_K_M", "a/b:Q4_K_M"),
            ("https://huggingface.co/a/b", "a/b"),
            ("https://huggingface.co/a/b/", "a/b"),
            ("huggingface.co/a/b?library=gguf#files", "a/b"),
            ("https://huggingface.co/a/b/tree/main", "a/b"),
            ("https://huggingface.co/a/b/tree/main/UD-Q4_K_XL", "a/b:UD-Q4_K_XL"),
            ("https://huggingface.co/a/b/resolve/main/M-Q8_0.gguf?download=true", "a/b:M-Q8_0"),
            ("https://hf.co/a/b/blob/main/Q4/M-00001-of-00002.gguf", "a/b:Q4/M-00001-of-00002"),
            // Neither models nor whole addresses.
            ("https://huggingface.co/datasets/a/b", ""),
            ("https://huggingface.co/a", ""),
            ("https://huggingface.co/a/b/discussions/3", ""),
            ("https://huggingface.co/a/b/resolve/main/../../x.gguf", ""),
            ("https://example.org/a/b", ""),
        ] {
            assert_eq!(read(address), name, "{address}");
        }
    }

    #[test]
    fn paths_and_nonsense_are_no_names() {
        for wrong in [
            "",
            "model.gguf",
            "/a/b",
            "a/b/c",
            "./b",
            "../b",
            "a/..",
            "a/b:",
            "a/b:../c",
            "a b/c",
            "a/b:Q4:Q5",
        ] {
            assert!(wrong.parse::<ModelName>().is_err(), "{wrong}");
        }
    }
}
