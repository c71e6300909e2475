//! A hub on this machine: it speaks as much of the real one's protocol as downloads need, and fails as told.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ring::digest;
use serde_json::{Value, json};

use crate::common::{Outcome, forebay};

/// The version that the repository is at.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The one repository.
pub const REPO: &str = "someone/Some-Model-GGUF";

/// What goes wrong, once.
#[derive(Clone, Debug)]
pub enum Fault {
    /// A list of files is refused.
    Refuse(u16, &'static str),
    /// A file is refused.
    RefuseFile(u16, &'static str),
    /// So many bytes of a file come, then the connection ends.
    Cut(usize),
    /// So many bytes of a file come, then nothing.
    Stall(usize),
    /// A file comes with one wrong byte.
    Damage,
    /// A part of a file was asked for, and the whole comes.
    IgnoreRange,
}

pub struct Hub {
    pub address: String,
    state: Arc<HubState>,
}

struct HubState {
    port: u16,
    files: Vec<(String, Vec<u8>)>,
    /// What the list says of sizes, where it lies.
    lies: Mutex<Vec<(String, u64)>>,
    faults: Mutex<Vec<Fault>>,
    requests: Mutex<Vec<Request>>,
}

#[derive(Clone, Debug, Default)]
pub struct Request {
    pub path: String,
    pub range: Option<String>,
    pub token: Option<String>,
    pub host: String,
    /// Bytes of the body that was sent.
    pub sent: usize,
}

impl Hub {
    pub fn new(files: Vec<(&str, Vec<u8>)>) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let files = files.into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect();
        let state = Arc::new(HubState {
            port,
            files,
            lies: Mutex::default(),
            faults: Mutex::default(),
            requests: Mutex::default(),
        });
        let served = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let state = Arc::clone(&served);
                std::thread::spawn(move || state.answer(stream.unwrap()));
            }
        });
        Hub { address: format!("http://127.0.0.1:{port}"), state }
    }

    /// What goes wrong next, in this order.
    pub fn fail(&self, faults: &[Fault]) {
        self.state.faults.lock().unwrap().extend_from_slice(faults);
    }

    /// Faults that nobody has met yet.
    pub fn faults_left(&self) -> usize {
        self.state.faults.lock().unwrap().len()
    }

    /// Lets the list say that a file has another size.
    pub fn lie(&self, name: &str, size: u64) {
        self.state.lies.lock().unwrap().push((name.to_owned(), size));
    }

    /// The requests so far for what begins so.
    pub fn requests(&self, start: &str) -> Vec<Request> {
        let all = self.state.requests.lock().unwrap();
        all.iter().filter(|request| request.path.starts_with(start)).cloned().collect()
    }

    /// A call of the program that knows this hub, with its downloads in a folder.
    pub fn command(&self, home: &Path, args: &[&str]) -> Command {
        let mut command = forebay(args);
        for name in
            ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY"]
        {
            command.env_remove(name);
        }
        command.env("HF_ENDPOINT", &self.address).env("HF_HOME", home);
        command
    }

    pub fn call(&self, home: &Path, args: &[&str]) -> Outcome {
        self.command(home, args).output().unwrap().into()
    }
}

/// Large files are kept beside git, with another checksum, and come from another address.
fn is_large(name: &str) -> bool {
    name.ends_with(".gguf") || name.ends_with(".safetensors")
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(digest::digest(&digest::SHA256, bytes).as_ref())
}

pub fn git_sha1(bytes: &[u8]) -> String {
    let blob = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
    hex(digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, &blob).as_ref())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl HubState {
    fn answer(&self, stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
        let Some(first) = lines.next() else { return };
        let mut request = Request { path: first.split(' ').nth(1).unwrap().to_owned(), ..Request::default() };
        for line in lines.take_while(|line| !line.is_empty()) {
            let (name, value) = line.split_once(':').unwrap();
            let value = value.trim().to_owned();
            match name.to_ascii_lowercase().as_str() {
                "range" => request.range = Some(value),
                "authorization" => request.token = Some(value),
                "host" => request.host = value,
                _ => {}
            }
        }
        let number = {
            let mut all = self.requests.lock().unwrap();
            all.push(request.clone());
            all.len() - 1
        };
        // A reader may have enough before the end.
        if let Ok(sent) = self.respond(&request, stream) {
            self.requests.lock().unwrap()[number].sent = sent;
        }
    }

    fn respond(&self, request: &Request, mut stream: TcpStream) -> std::io::Result<usize> {
        let path = request.path.as_str();
        if let Some(rest) = path.strip_prefix("/api/models/") {
            if let Some(Fault::Refuse(status, headers)) = self.next(|f| matches!(f, Fault::Refuse(..))) {
                return send(&mut stream, status, headers, b"no");
            }
            if rest != format!("{REPO}/revision/main?blobs=true") {
                return send(
                    &mut stream,
                    404,
                    "X-Error-Code: RepoNotFound\r\nX-Error-Message: Repository not found\r\n",
                    b"",
                );
            }
            return send(&mut stream, 200, "", self.listing().to_string().as_bytes());
        }
        if let Some(name) = path.strip_prefix(&format!("/{REPO}/resolve/{COMMIT}/")) {
            if let Some(Fault::RefuseFile(status, headers)) =
                self.next(|f| matches!(f, Fault::RefuseFile(..)))
            {
                return send(&mut stream, status, headers, b"no");
            }
            let Some((_, bytes)) = self.files.iter().find(|(n, _)| n == name) else {
                return send(&mut stream, 404, "X-Error-Code: EntryNotFound\r\n", b"");
            };
            if is_large(name) {
                let (sum, size) = (sha256(bytes), bytes.len());
                // The other address has another host's name.
                let location = format!("http://localhost:{}/large/{sum}", self.port);
                let headers = format!(
                    "Location: {location}\r\nX-Repo-Commit: {COMMIT}\r\nX-Linked-Etag: \"{sum}\"\r\nX-Linked-Size: {size}\r\n"
                );
                return send(&mut stream, 302, &headers, b"");
            }
            let headers = format!("ETag: \"{}\"\r\nX-Repo-Commit: {COMMIT}\r\n", git_sha1(bytes));
            return self.send_file(&mut stream, request, &headers, bytes);
        }
        if let Some(sum) = path.strip_prefix("/large/") {
            let (_, bytes) = self.files.iter().find(|(_, bytes)| sha256(bytes) == sum).unwrap();
            return self.send_file(&mut stream, request, "", bytes);
        }
        send(&mut stream, 404, "", b"")
    }

    fn listing(&self) -> Value {
        let lies = self.lies.lock().unwrap();
        let siblings = self.files.iter().map(|(name, bytes)| {
            let lie = lies.iter().find(|(lied, _)| lied == name);
            let size = lie.map_or(bytes.len() as u64, |(_, size)| *size);
            let mut sibling = json!({ "rfilename": name, "size": size, "blobId": git_sha1(bytes) });
            if is_large(name) {
                sibling["lfs"] = json!({ "sha256": sha256(bytes), "size": size, "pointerSize": 135 });
            }
            sibling
        });
        json!({ "id": REPO, "sha": COMMIT, "siblings": siblings.collect::<Vec<_>>() })
    }

    fn send_file(
        &self,
        stream: &mut TcpStream,
        request: &Request,
        headers: &str,
        bytes: &[u8],
    ) -> std::io::Result<usize> {
        let fault = self.next(|f| !matches!(f, Fault::Refuse(..) | Fault::RefuseFile(..)));
        let range = request.range.as_ref().filter(|_| !matches!(fault, Some(Fault::IgnoreRange)));
        let (mut from, mut to) = (0, bytes.len());
        if let Some(range) = range {
            let (start, end) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            from = start.parse().unwrap();
            if let Ok(end) = end.parse::<usize>() {
                to = to.min(end + 1);
            }
        }
        let mut body = bytes[from..to].to_vec();
        if matches!(fault, Some(Fault::Damage)) {
            let middle = body.len() / 2;
            body[middle] ^= 1;
        }
        let status = if range.is_some() { 206 } else { 200 };
        let of = bytes.len();
        let mut head =
            format!("HTTP/1.1 {status} OK\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
        if range.is_some() {
            head += &format!("Content-Range: bytes {from}-{}/{of}\r\n", to - 1);
        }
        stream.write_all(format!("{head}{headers}\r\n").as_bytes())?;
        match fault {
            Some(Fault::Cut(count)) => body.truncate(count),
            Some(Fault::Stall(count)) => {
                stream.write_all(&body[..count])?;
                std::thread::sleep(Duration::from_secs(30));
                return Ok(count);
            }
            _ => {}
        }
        stream.write_all(&body)?;
        Ok(body.len())
    }

    /// The next fault, if it is of a kind.
    fn next(&self, kind: impl Fn(&Fault) -> bool) -> Option<Fault> {
        let mut faults = self.faults.lock().unwrap();
        if faults.first().is_some_and(kind) { Some(faults.remove(0)) } else { None }
    }
}

fn send(stream: &mut TcpStream, status: u16, headers: &str, body: &[u8]) -> std::io::Result<usize> {
    let length = body.len();
    let head =
        format!("HTTP/1.1 {status} x\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n");
    stream.write_all(&[head.as_bytes(), body].concat())?;
    Ok(length)
}
