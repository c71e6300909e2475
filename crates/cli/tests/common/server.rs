//! A server under test, and a client that can misbehave.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::forebay;

/// How long anything may take.
pub const LIMIT: Duration = Duration::from_secs(120);

pub struct Server {
    child: Running,
    pub address: String,
    log: Arc<Mutex<String>>,
    /// What it remembers from run to run, removed with it.
    _cache: Option<tempfile::TempDir>,
    /// Sent with every request.
    pub key: Option<&'static str>,
}

impl Server {
    /// A server that is ready.
    pub fn start(args: &[&str]) -> Server {
        Server::start_unready(args).until_ready()
    }

    /// A server that is ready and remembers things in a folder.
    pub fn start_in(cache: &Path, args: &[&str]) -> Server {
        Server::listening(cache, args).until_ready()
    }

    /// A server that listens.
    pub fn start_unready(args: &[&str]) -> Server {
        let cache = tempfile::tempdir().unwrap();
        let server = Server::listening(cache.path(), args);
        Server { _cache: Some(cache), ..server }
    }

    fn until_ready(self) -> Server {
        let start = Instant::now();
        while self.get("/ready").status != 200 {
            assert!(start.elapsed() < LIMIT, "not ready: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        self
    }

    fn listening(cache: &Path, args: &[&str]) -> Server {
        let key = args.iter().position(|arg| *arg == "--api-key").map(|_| "open sesame");
        let threads: &[&str] = if args.contains(&"--threads") { &[] } else { &["--threads", "2"] };
        let mut command = forebay([&["serve", "--port", "0"], threads, args].concat());
        let mut child = command.env("XDG_CACHE_HOME", cache).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let first = lines.next().unwrap_or_else(|| panic!("the server ends at once")).unwrap();
        let address =
            first.strip_prefix("Listening at http://").unwrap_or_else(|| panic!("{first}")).to_owned();
        let log = Arc::new(Mutex::new(String::new()));
        let writer = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                writer.lock().unwrap().push_str(&format!("{line}\n"));
            }
        });
        Server { child: Running(child), address, log, key, _cache: None }
    }

    /// What it has said.
    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// Sends a request and nothing more.
    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> TcpStream {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n", self.address);
        let given = |name: &str| headers.iter().any(|(known, _)| known.eq_ignore_ascii_case(name));
        if let Some(key) = self.key.filter(|_| !given("authorization") && !given("x-api-key")) {
            head.push_str(&format!("authorization: Bearer {key}\r\n"));
        }
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if !body.is_empty() || method == "POST" {
            head.push_str(&format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len()));
        }
        let mut stream = self.connect();
        stream.write_all(format!("{head}\r\n").as_bytes()).unwrap();
        // A server may refuse a body before it has all of it.
        let _ = stream.write_all(body);
        stream
    }

    pub fn call(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
        Response::read(self.send(method, path, headers, body))
    }

    pub fn get(&self, path: &str) -> Response {
        self.call("GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Response {
        self.call("POST", path, &[], body.to_string().as_bytes())
    }

    /// Sends a request whose answer comes in pieces.
    pub fn stream(&self, path: &str, body: &Value) -> Stream {
        let mut body = body.clone();
        body["stream"] = true.into();
        Stream::read(self.send("POST", path, &[], body.to_string().as_bytes()))
    }

    /// The number that a line of the metrics ends with.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    }

    /// Waits until a metric has a value.
    #[track_caller]
    pub fn wait_for_metric(&self, name: &str, value: f64, limit: Duration) {
        let start = Instant::now();
        while self.metric(name) != value {
            assert!(start.elapsed() < limit, "{name} is {} after {limit:?}", self.metric(name));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The most memory that it ever had, in bytes, where the system tells.
    pub fn peak_memory(&self) -> Option<u64> {
        self.memory("VmHWM:")
    }

    /// The memory that it has now, in bytes, where the system tells.
    pub fn resident_memory(&self) -> Option<u64> {
        self.memory("VmRSS:")
    }

    fn memory(&self, name: &str) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.0.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
    }

    /// Sends it a signal.
    pub fn signal(&self, name: &str) {
        let id = self.child.0.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &id]).status().unwrap().success());
    }

    /// Its exit code, when it has ended.
    #[track_caller]
    pub fn wait(&mut self, limit: Duration) -> Option<i32> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.0.try_wait().unwrap() {
                return status.code();
            }
            assert!(start.elapsed() < limit, "still running after {limit:?}: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A process that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A whole answer.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Response {
    pub fn read(stream: TcpStream) -> Response {
        let mut reader = BufReader::new(stream);
        let (status, headers) = read_head(&mut reader);
        let mut body = Vec::new();
        let chunked = headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked");
        if chunked {
            while let Some(chunk) = read_chunk(&mut reader) {
                body.extend(chunk);
            }
        } else {
            let _ = reader.read_to_end(&mut body);
        }
        Response { status, headers, body }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("{}: {}", self.status, self.text()))
    }

    /// The body of an answer that succeeded.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        self.json()
    }
}

/// An answer that comes in pieces.
pub struct Stream {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    reader: BufReader<TcpStream>,
    text: String,
}

impl Stream {
    pub fn read(stream: TcpStream) -> Stream {
        let mut reader = BufReader::new(stream);
        let (status, headers) = read_head(&mut reader);
        Stream { status, headers, reader, text: String::new() }
    }

    /// The data of the next event; `None` at the end.
    pub fn next(&mut self) -> Option<String> {
        loop {
            let event = self.event()?;
            let field =
                |name: &str| event.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
            let Some(data) = field("data: ") else { continue };
            if let Some(name) = field("event: ") {
                let data: Value = serde_json::from_str(&data).unwrap();
                let kind = data["type"].as_str().unwrap_or(&name);
                assert_eq!(kind, name, "an event has the name of its type, where it has one");
            }
            return Some(data);
        }
    }

    /// Waits for the next comment, before which nothing else may come.
    #[track_caller]
    pub fn comment(&mut self) {
        let event = self.event().expect("the stream goes on");
        assert!(event.starts_with(':'), "{event:?} is no comment");
    }

    /// The lines of the next event or comment.
    fn event(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.text.find("\n\n") {
                return Some(self.text.drain(..end + 2).collect());
            }
            let chunk = read_chunk(&mut self.reader)?;
            self.text.push_str(std::str::from_utf8(&chunk).unwrap());
        }
    }

    /// All that comes, where no word ends it.
    #[track_caller]
    pub fn events(mut self) -> Vec<Value> {
        assert_eq!(self.status, 200);
        std::iter::from_fn(|| self.next()).map(|data| serde_json::from_str(&data).unwrap()).collect()
    }

    /// All that comes, up to the word that ends it.
    #[track_caller]
    pub fn chunks(mut self) -> Vec<Value> {
        assert_eq!(self.status, 200);
        let mut chunks = Vec::new();
        loop {
            match self.next().expect("a stream ends with [DONE]").as_str() {
                "[DONE]" => break,
                data => chunks.push(serde_json::from_str(data).unwrap()),
            }
        }
        assert_eq!(self.next(), None, "nothing follows [DONE]");
        chunks
    }
}

fn read_head(reader: &mut BufReader<TcpStream>) -> (u16, Vec<(String, String)>) {
    let mut lines = reader.lines().map(|line| line.unwrap()).take_while(|line| !line.is_empty());
    let first = lines.next().expect("the connection ended without an answer");
    let status = first.split(' ').nth(1).unwrap().parse().unwrap();
    let header = |line: String| {
        let (name, value) = line.split_once(':').unwrap();
        (name.to_ascii_lowercase(), value.trim().to_owned())
    };
    (status, lines.map(header).collect())
}

fn read_chunk(reader: &mut BufReader<TcpStream>) -> Option<Vec<u8>> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let size = usize::from_str_radix(line.trim(), 16).ok()?;
    let mut chunk = vec![0; size + 2];
    reader.read_exact(&mut chunk).ok()?;
    chunk.truncate(size);
    (size > 0).then_some(chunk)
}

/// A question.
pub fn question(text: &str) -> Value {
    json!([{ "role": "user", "content": text }])
}
