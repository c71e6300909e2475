//! The two files of a batch: requests, which are read line by line, and answers, which are appended line by line.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use forebay_engine::internals::files::private_options;
use ring::digest::{SHA256, digest};
use serde::Deserialize;
use serde_json::{Value, json};

use super::hash;

/// A line of the file of requests.
#[derive(Deserialize)]
pub struct Line {
    pub custom_id: String,
    #[serde(default)]
    pub url: Option<String>,
    pub body: Value,
}

/// Represents a custom_id in memory: half a SHA-256, because names may be long and there may be millions of them.
pub fn name(custom_id: &str) -> u128 {
    let sum = digest(&SHA256, custom_id.as_bytes());
    u128::from_le_bytes(sum.as_ref()[..16].try_into().expect("a SHA-256 has 32 bytes"))
}

/// The file of requests. It is read twice: to check all requests before the model is loaded, and to answer them. It is never
/// in memory as a whole.
pub struct Requests {
    file: File,
    path: PathBuf,
    /// Its length when it was opened. Requests that are added later are left to a later run.
    bytes: u64,
}

impl Requests {
    pub fn open(path: &Path) -> Result<Requests> {
        let cannot = || format!("cannot open {}", path.display());
        let mut file = File::open(path).with_context(cannot)?;
        if !file.metadata().with_context(cannot)?.is_file() {
            // A pipe cannot be read twice.
            let mut copy = tempfile::tempfile().context("cannot make a temporary file")?;
            io::copy(&mut file, &mut copy).with_context(|| format!("cannot copy {}", path.display()))?;
            file = copy;
        }
        let bytes = file.metadata().with_context(cannot)?.len();
        Ok(Requests { file, path: path.to_owned(), bytes })
    }

    /// The [names](name) of all requests, sorted.
    ///
    /// # Errors
    /// If a line is not a request, if two requests have the same custom_id, or if there are no requests.
    pub fn check(&self) -> Result<Vec<u128>> {
        let names = self.lines()?.map(|line| Ok(name(&line?.custom_id)));
        let mut names = names.collect::<Result<Vec<u128>>>()?;
        ensure!(!names.is_empty(), "{} has no requests", self.path.display());
        names.sort_unstable();
        let twice: HashSet<u128> =
            names.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]).collect();
        if !twice.is_empty() {
            self.name_the_first_of(&twice)?;
        }
        Ok(names)
    }

    /// The error about the first request that repeats one of these custom_ids.
    fn name_the_first_of(&self, twice: &HashSet<u128>) -> Result<()> {
        let mut seen = HashMap::new();
        for (number, line) in self.numbered_lines()? {
            let id = line?.custom_id;
            let name = name(&id);
            if twice.contains(&name)
                && let Some(before) = seen.insert(name, number)
            {
                let path = self.path.display();
                bail!("{path}, line {number}: custom_id {id:?} is also the custom_id of line {before}");
            }
        }
        Ok(())
    }

    /// All requests, in the file's order.
    pub fn lines(&self) -> Result<impl Iterator<Item = Result<Line>>> {
        Ok(self.numbered_lines()?.map(|(_, line)| line))
    }

    /// All requests with their line numbers, which start at 1. Empty lines are left out.
    fn numbered_lines(&self) -> Result<impl Iterator<Item = (usize, Result<Line>)>> {
        let path = &self.path;
        (&self.file).seek(SeekFrom::Start(0)).with_context(|| format!("cannot read {}", path.display()))?;
        let lines = BufReader::new((&self.file).take(self.bytes)).lines();
        Ok((1..).zip(lines).filter_map(move |(number, text)| {
            let at = || format!("{}, line {number}", path.display());
            let text = match text.with_context(|| format!("{}: cannot read it as text", at())) {
                Ok(text) if text.trim().is_empty() => return None,
                Ok(text) => text,
                Err(error) => return Some((number, Err(error))),
            };
            let line = serde_json::from_str(&text);
            Some((number, line.with_context(|| format!("{}: not a request with custom_id and body", at()))))
        }))
    }
}

/// The answers in the file when it was opened: [names](name), sorted, and whether each is a refusal.
pub struct Earlier(Vec<(u128, bool)>);

impl Earlier {
    /// Whether an earlier run refused a request; `None` if it has no answer yet.
    pub fn was_refused(&self, name: u128) -> Option<bool> {
        let at = self.0.binary_search_by_key(&name, |&(name, _)| name).ok()?;
        Some(self.0[at].1)
    }
}

/// The file of answers.
pub struct Answers {
    file: File,
    path: PathBuf,
}

/// The fields of an answer's line that say which request it answers and whether it is a refusal.
#[derive(Deserialize)]
struct Written {
    custom_id: String,
    #[serde(default)]
    response: Option<Status>,
}

#[derive(Deserialize)]
struct Status {
    #[serde(default)]
    status_code: Option<u16>,
}

impl Answers {
    /// Opens the file and finds its answers. Removes an incomplete last line, which an ended program may have left.
    pub fn open(path: &Path) -> Result<(Answers, Earlier)> {
        let cannot = || format!("cannot write {}", path.display());
        let mut file = private_options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .with_context(cannot)?;
        let mut earlier = Vec::new();
        let mut whole = 0;
        let mut reader = BufReader::new(&mut file);
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            if reader
                .read_until(b'\n', &mut line)
                .with_context(|| format!("cannot read {}", path.display()))?
                == 0
            {
                break;
            }
            match serde_json::from_slice::<Written>(&line) {
                Ok(Written { custom_id, response }) if line.ends_with(b"\n") => {
                    let status = response.and_then(|response| response.status_code);
                    earlier.push((name(&custom_id), status.is_some_and(|status| status != 200)));
                    whole += line.len() as u64;
                }
                // Only the last line can be incomplete.
                _ if !line.ends_with(b"\n") => break,
                _ => bail!(
                    "{}, line {number}: not an answer; --out names a file of another kind",
                    path.display()
                ),
            }
        }
        drop(reader);
        file.set_len(whole).and_then(|()| file.seek(SeekFrom::Start(whole))).with_context(cannot)?;
        earlier.sort_unstable();
        earlier.dedup_by_key(|(name, _)| *name);
        Ok((Answers { file, path: path.to_owned() }, Earlier(earlier)))
    }

    /// Adds an answer.
    pub fn write(&mut self, custom_id: &str, status: u16, body: &Value) -> Result<()> {
        let name = format!("batch_req_{:016x}", hash(custom_id));
        let line = json!({
            "id": name,
            "custom_id": custom_id,
            "response": { "status_code": status, "request_id": name, "body": body },
            "error": null,
        });
        // One write per line, so that an ended program leaves at most the last line incomplete.
        let written = self.file.write_all(format!("{line}\n").as_bytes());
        written.with_context(|| format!("cannot write {}", self.path.display()))
    }
}
