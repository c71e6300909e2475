//! Requests to the hub, with its refusals explained.

use std::io::Read;
use std::thread;
use std::time::{Duration, Instant};

use forebay_engine::Cancel;
use hf_hub::api::sync::{Api, ApiBuilder};
use hf_hub::{Cache, Repo, RepoType};
use serde::Deserialize;
use ureq::http::Response;
use ureq::{Agent, Body};

use crate::choice::File;
use crate::error::{Context, Error, Result, bail, failure};
use crate::name::is_portable;

/// How long the hub may be silent.
const SILENCE: Duration = Duration::from_secs(60);

/// The longest wait that the hub may ask for; beyond it a person should decide.
const LONGEST_WAIT: Duration = Duration::from_secs(300);

/// The longest wait between attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The most bytes that a file may have: all files that a list can name stay below the largest number.
const MAX_FILE: u64 = 1 << 43;

/// The most bytes that a list of files may have.
const MAX_LISTING: u64 = 64 << 20;

/// Who asks the hub.
pub struct Client {
    agent: Agent,
    api: Api,
    endpoint: String,
    token: Option<String>,
    retries: usize,
    cancel: Cancel,
}

/// A checksum that the hub gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// Of the file.
    Sha256(String),
    /// Of the file with git's header for blobs before it.
    GitSha1(String),
}

/// A file on the hub.
#[derive(Clone, Debug)]
pub struct RemoteFile {
    pub file: File,
    pub checksum: Checksum,
}

impl RemoteFile {
    /// What the file's blob is called in the cache.
    pub(crate) fn blob(&self) -> &str {
        match &self.checksum {
            Checksum::Sha256(hex) | Checksum::GitSha1(hex) => hex,
        }
    }
}

/// A version of a repository.
pub struct Listing {
    pub repo: String,
    pub commit: String,
    pub files: Vec<RemoteFile>,
}

/// Why a request failed.
pub enum Failure {
    /// Asking again will not help.
    Final(Error),
    /// It may work later: when, if the hub said so.
    Passing(Error, Option<Duration>),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Final(error)
    }
}

impl Client {
    /// A client for the hub at `endpoint`, or at its usual address.
    pub fn new(
        endpoint: Option<String>,
        token: Option<String>,
        retries: usize,
        cancel: &Cancel,
    ) -> Result<Client> {
        // Only its addresses are used: the cache is ours to choose, and so are requests.
        let mut builder = ApiBuilder::from_cache(Cache::new(std::env::temp_dir())).with_token(None);
        if let Some(endpoint) = endpoint {
            builder = builder.with_endpoint(endpoint.trim_end_matches('/').to_owned());
        }
        let api = builder.build().context("cannot prepare requests")?;
        let endpoint = api.model("x".into()).url("x");
        let endpoint = endpoint.trim_end_matches("/x/resolve/main/x").to_owned();
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // A signed address elsewhere must not see the token.
            .redirect_auth_headers(ureq::config::RedirectAuthHeaders::SameHost)
            .accept_encoding("identity")
            .user_agent(concat!("forebay/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(SILENCE))
            .timeout_connect(Some(SILENCE))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE));
        Ok(Client { agent: config.build().into(), api, endpoint, token, retries, cancel: cancel.clone() })
    }

    /// The files of a repository's main branch.
    pub(crate) fn listing(&self, repo: &str) -> Result<Listing> {
        let address = Repo::model(repo.to_owned()).api_url();
        let url = format!("{}/api/{address}?blobs=true", self.endpoint);
        // Whoever waits for the first answer is in front of the screen.
        self.patiently(self.retries.min(3), &|_| (), &mut || {
            let mut response = self.get(&url, None, repo)?;
            let body = response.body_mut().with_config().limit(MAX_LISTING).read_to_vec();
            let body = body.map_err(|e| self.unreachable(e))?;
            let listing = Listing::parse(repo, &body);
            Ok(listing.with_context(|| format!("{} did not return a list of files", self.endpoint))?)
        })
    }

    /// The address of a file.
    pub(crate) fn address(&self, listing: &Listing, name: &str) -> String {
        let repo = Repo::with_revision(listing.repo.clone(), RepoType::Model, listing.commit.clone());
        self.api.repo(repo).url(&escaped(name))
    }

    /// Asks for a file, or for its bytes from the first to before the last of `range`.
    pub(crate) fn get(
        &self,
        url: &str,
        range: Option<(u64, Option<u64>)>,
        repo: &str,
    ) -> Result<Response<Body>, Failure> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if let Some((from, to)) = range {
            let to = to.map_or(String::new(), |to| (to - 1).to_string());
            request = request.header("Range", format!("bytes={from}-{to}"));
        }
        let response = request.call().map_err(|e| self.unreachable(e))?;
        if response.status().is_success() { Ok(response) } else { Err(self.refusal(&response, repo)) }
    }

    /// Some bytes of a file.
    pub(crate) fn read_range(&self, url: &str, from: u64, to: u64, repo: &str) -> Result<Vec<u8>> {
        self.patiently(self.retries.min(3), &|_| (), &mut || {
            let mut bytes = Vec::new();
            let response = self.get(url, Some((from, Some(to))), repo)?;
            let skip = if response.status() == 206 { 0 } else { from };
            let mut body = response.into_body().into_with_config().limit(to + 1).reader();
            let cut = |e| Failure::Passing(Error::caused("the connection was cut", e), None);
            std::io::copy(&mut (&mut body).take(skip), &mut std::io::sink()).map_err(cut)?;
            body.take(to - from).read_to_end(&mut bytes).map_err(cut)?;
            if (bytes.len() as u64) < to - from {
                return Err(Failure::Passing(failure!("the connection was cut"), None));
            }
            Ok(bytes)
        })
    }

    /// Tries again and again, with longer and longer pauses, while what is wrong may pass; `waiting` is told of them.
    pub(crate) fn patiently<T>(
        &self,
        retries: usize,
        waiting: &dyn Fn(String),
        attempt: &mut dyn FnMut() -> Result<T, Failure>,
    ) -> Result<T> {
        let mut pause = Duration::from_millis(500);
        for left in (0..=retries).rev() {
            self.cancel.check()?;
            let (error, wait) = match attempt() {
                Ok(value) => return Ok(value),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Passing(error, wait)) => (error, wait),
            };
            if left == 0 || wait.is_some_and(|wait| wait > LONGEST_WAIT) {
                return Err(error);
            }
            let wait = wait.unwrap_or(pause);
            waiting(format!("{error}; trying again in {:.0} s", wait.as_secs_f64().ceil()));
            self.wait(wait)?;
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
        unreachable!("the last attempt returns")
    }

    /// How often a download that makes no progress is tried again.
    pub(crate) fn retries(&self) -> usize {
        self.retries
    }

    /// Fails if the user wants to stop.
    pub(crate) fn check(&self) -> Result<()> {
        Ok(self.cancel.check()?)
    }

    fn wait(&self, duration: Duration) -> Result<()> {
        let start = Instant::now();
        while let Some(left) = duration.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
            self.cancel.check()?;
            thread::sleep(left.min(Duration::from_millis(100)));
        }
        Ok(())
    }

    fn unreachable(&self, error: ureq::Error) -> Failure {
        use ureq::Error as E;
        let passing = matches!(
            error,
            E::Io(_) | E::Timeout(_) | E::ConnectionFailed | E::HostNotFound | E::Protocol(_)
        );
        let message = format!("cannot reach {}; is this machine online?", self.endpoint);
        let error = Error::caused(message, error);
        if passing { Failure::Passing(error, None) } else { Failure::Final(error) }
    }

    /// What a refusal means, and what to do about it.
    fn refusal(&self, response: &Response<Body>, repo: &str) -> Failure {
        let header = |name: &str| response.headers().get(name).and_then(|v| v.to_str().ok());
        let said = header("x-error-message").map_or(String::new(), |text| format!(" ({text})"));
        let endpoint = &self.endpoint;
        let log_in = "create a token on its settings page, then set HF_TOKEN or log in with `hf auth login`";
        match response.status().as_u16() {
            401 if self.token.is_some() => Failure::Final(failure!(
                "{endpoint} does not accept your token for {repo}{said}: it is wrong or has expired, or there is no \
                 such repository; {log_in}"
            )),
            401 => Failure::Final(failure!(
                "{endpoint} does not show {repo} without a token{said}: check the name; if it is private or gated, \
                 {log_in}"
            )),
            403 => Failure::Final(failure!(
                "{endpoint} does not let you have {repo}{said}: ask for access at {endpoint}/{repo}, with the account \
                 of your token"
            )),
            404 => Failure::Final(failure!("{endpoint} has no {repo}{said}; check the spelling")),
            429 => {
                let wait =
                    header("retry-after").and_then(|text| text.trim().parse().ok()).map(Duration::from_secs);
                let when = wait.map_or("later".into(), |wait| format!("in {} s", wait.as_secs()));
                let advice =
                    if self.token.is_none() { ", or log in: the limit is higher with a token" } else { "" };
                let message = format!(
                    "{endpoint} received too many requests from this address{said}; try again {when}{advice}"
                );
                Failure::Passing(Error::new(message), wait)
            }
            status @ (408 | 500..) => Failure::Passing(
                failure!("{endpoint} has an internal problem (status {status}){said}; try again later"),
                None,
            ),
            status => Failure::Final(failure!("{endpoint} answered with status {status} for {repo}{said}")),
        }
    }
}

impl Listing {
    /// Reads the hub's answer, and believes none of its names before they are checked.
    fn parse(repo: &str, body: &[u8]) -> Result<Listing> {
        #[derive(Deserialize)]
        struct Answer {
            sha: String,
            siblings: Vec<Sibling>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Sibling {
            rfilename: String,
            size: Option<u64>,
            blob_id: Option<String>,
            lfs: Option<Lfs>,
        }
        #[derive(Deserialize)]
        struct Lfs {
            sha256: String,
            size: u64,
        }
        let Answer { sha, siblings } =
            serde_json::from_slice(body).map_err(|error| Error::new(error.to_string()))?;
        if !is_hex(&sha, 40) {
            bail!("its version {sha:?} is not a commit");
        }
        let mut files = Vec::new();
        for Sibling { rfilename: name, size, blob_id, lfs } in siblings {
            let outside = |part: &str| matches!(part, "" | "." | "..") || part.contains(['\\', '\0']);
            if name.split('/').any(outside) {
                bail!("the name {name:?} leads out of the repository");
            }
            if let Some(part) = name.split('/').find(|part| !is_portable(part)) {
                bail!("the name {name:?} is refused: {part:?} is not a file name on Windows");
            }
            let (bytes, checksum) = match (lfs, size, blob_id) {
                (Some(lfs), _, _) if is_hex(&lfs.sha256, 64) => (lfs.size, Checksum::Sha256(lfs.sha256)),
                (None, Some(size), Some(id)) if is_hex(&id, 40) => (size, Checksum::GitSha1(id)),
                _ => bail!("{name} has no size or no checksum"),
            };
            if bytes > MAX_FILE {
                bail!("{name} cannot have {bytes} bytes");
            }
            files.push(RemoteFile { file: File { name, bytes }, checksum });
        }
        Ok(Listing { repo: repo.to_owned(), commit: sha, files })
    }

    /// The file of this name, which is one of the list.
    pub(crate) fn file(&self, name: &str) -> &RemoteFile {
        self.files.iter().find(|file| file.file.name == name).expect("the name comes from the list")
    }
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| b.is_ascii_hexdigit() && !b.is_ascii_uppercase())
}

/// A file's name as part of an address.
fn escaped(name: &str) -> String {
    let mut address = String::new();
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~' | b'/') {
            address.push(byte.into());
        } else {
            address += &format!("%{byte:02X}");
        }
    }
    address
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped_in_addresses() {
        assert_eq!(escaped("Q4/a b#é.gguf"), "Q4/a%20b%23%C3%A9.gguf");
    }

    #[test]
    fn what_the_hub_says_is_checked() {
        let answer = |name: &str, sum: &str| {
            let body = format!(
                r#"{{"sha": "{}", "siblings": [{{"rfilename": "{name}", "size": 5, "lfs": {{"sha256": "{sum}", "size": 7}}}}]}}"#,
                "a1".repeat(20)
            );
            Listing::parse("a/b", body.as_bytes())
        };
        let sum = "0f".repeat(32);
        let good = answer("Q4/a.gguf", &sum).unwrap();
        assert_eq!((good.file("Q4/a.gguf").file.bytes, good.file("Q4/a.gguf").blob()), (7, &*sum));
        for name in ["../a", "/a", "a//b", "a/..", "..", ""] {
            assert!(answer(name, &sum).is_err(), "{name}");
        }
        for name in
            ["C:a.gguf", "a/b:c", "nul", "Q4/CON.gguf", "aux .txt", "com1", "LPT9.x.y", "COM¹", "a.", "a /b"]
        {
            let refusal = answer(name, &sum).err().unwrap_or_else(|| panic!("{name}")).to_string();
            assert!(refusal.contains("on Windows"), "{refusal}");
        }
        for name in ["console.gguf", "null", "a.con", "com", "com10", ".gitattributes", "a b.gguf"] {
            answer(name, &sum).unwrap();
        }
        for wrong in ["", "../../x", &sum[1..]] {
            assert!(answer("a", wrong).is_err(), "{wrong}");
        }
        assert!(Listing::parse("a/b", b"<html>").is_err());
        assert!(Listing::parse("a/b", br#"{"sha": "../x", "siblings": []}"#).is_err());
    }
}
