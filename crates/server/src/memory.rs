//! The memory of requests: counted against the budget, limited, and released with the request.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use forebay_engine::internals::memory::of_process;
use forebay_engine::{Bytes as Size, Engine, Hold};
use http_body::{Frame, SizeHint};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout_at};

use crate::error::{ApiError, INSUFFICIENT_MEMORY};

/// All requests together may use the budget divided by this.
const SHARE: u64 = 4;

/// Memory for requests that the plan already contains. Only memory beyond it is taken from the expert cache, in steps, so that
/// small requests evict no experts.
const UNCOUNTED: u64 = 4 << 20;
const STEP: u64 = 1 << 20;

/// How long a request waits for the memory of other requests, and how often it checks for it.
const PATIENCE: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(250);

/// Granted memory is resident after this time.
const SOON: Duration = Duration::from_millis(200);

/// A client may retry a request after so many seconds if there was no memory for it.
const RETRY_SECONDS: u64 = 5;

/// After requests have released so many bytes, the allocator is asked to return them to the system. This happens a moment later, when
/// the last bytes are free too, and at most once in this time.
const MUCH: u64 = 1 << 20;
const LATER: Duration = Duration::from_secs(1);

/// Bytes that requests have released since the allocator was last asked. It is global, as the allocator is.
static FREED: AtomicU64 = AtomicU64::new(0);
static MUCH_FREED: Notify = Notify::const_new();

/// Returns the memory of answered requests to the system, as long as the program runs.
pub async fn give_back_freed() {
    loop {
        MUCH_FREED.notified().await;
        sleep(LATER).await;
        FREED.store(0, Ordering::Relaxed);
        let _ = tokio::task::spawn_blocking(forebay_engine::internals::memory::give_back_freed).await;
    }
}

/// The memory that this process has resident, in bytes, if the system tells.
pub fn resident() -> Option<u64> {
    of_process("VmRSS:")
}

/// The memory of all requests of a model.
pub struct RequestMemory {
    most: u64,
    /// The budget of the process, and a function for its present use.
    budget: u64,
    resident: fn() -> u64,
    held: Mutex<Held>,
    /// Notified when a request releases memory.
    freed: Notify,
}

struct Held {
    /// By all requests.
    used: u64,
    /// Bytes granted within the last [`SOON`], with the times: they may not be resident yet.
    granted: Vec<(Instant, u64)>,
    /// The part that the engine counts.
    counted: Hold,
}

impl RequestMemory {
    pub fn new(engine: &Engine) -> RequestMemory {
        let most = (engine.plan().budget / SHARE).max(UNCOUNTED);
        let held = Held { used: 0, granted: Vec::new(), counted: engine.hold_for_requests() };
        let (budget, resident) = (engine.plan().budget, forebay_engine::internals::memory::resident);
        RequestMemory { most, budget, resident, held: Mutex::new(held), freed: Notify::new() }
    }

    /// Changes the memory of a request from `from` bytes to `to` bytes.
    fn resize(&self, from: u64, to: u64) -> Result<(), ApiError> {
        let mut held = self.lock();
        let used = (held.used - from).saturating_add(to);
        if to > from && used > self.most {
            return Err(self.refusal(to));
        }
        let counted = used.saturating_sub(UNCOUNTED).next_multiple_of(STEP);
        let before = held.counted.bytes();
        if counted != before {
            held.counted.resize(counted).map_err(|_| busy())?;
        }
        if counted > before && !self.fits(&mut held, to - from) {
            // Releasing memory does not fail.
            let _ = held.counted.resize(before);
            MUCH_FREED.notify_one();
            return Err(busy());
        }
        held.used = used;
        if to < from {
            self.freed.notify_waiters();
            if FREED.fetch_add(from - to, Ordering::Relaxed) + (from - to) >= MUCH {
                MUCH_FREED.notify_one();
            }
        }
        Ok(())
    }

    /// Grants so many more bytes if the process then stays within its budget. The process itself is checked, because not all of its
    /// memory can be counted: the allocator has gaps, and the program's own pages become resident when they are used.
    fn fits(&self, held: &mut Held, bytes: u64) -> bool {
        let now = Instant::now();
        held.granted.retain(|(when, _)| now - *when < SOON);
        let soon: u64 = held.granted.iter().map(|(_, bytes)| bytes).sum();
        let fits = (self.resident)().saturating_add(soon).saturating_add(bytes) <= self.budget;
        if fits {
            held.granted.push((now, bytes));
        }
        fits
    }

    fn refusal(&self, bytes: u64) -> ApiError {
        if bytes <= self.most {
            return busy();
        }
        let message = format!(
            "the request needs {} of memory, but all requests together may use {}: send a smaller request, or start the \
             server with a larger Options::memory",
            Size(bytes),
            Size(self.most)
        );
        let error = ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message);
        ApiError { code: Some(INSUFFICIENT_MEMORY), ..error }
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        // All numbers change together, after everything that can fail.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The error if other requests use the memory.
pub fn busy() -> ApiError {
    let message = "other requests use the memory that this request needs: try again later";
    let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
    ApiError { code: Some("rate_limit_exceeded"), ..error }.after(RETRY_SECONDS)
}

tokio::task_local! {
    static CURRENT: Arc<Account>;
}

/// The memory of one request. All tasks that work on the request share it; it is released with the last of them.
pub struct Account {
    /// When the request arrived.
    pub started: Instant,
    /// Whether the client has disconnected.
    left: AtomicBool,
    /// Bytes for converting the body to a prompt.
    preparing: AtomicU64,
    held: Mutex<(u64, Option<Arc<RequestMemory>>)>,
}

impl Account {
    pub fn new() -> Arc<Account> {
        Arc::new(Account {
            started: Instant::now(),
            left: AtomicBool::new(false),
            preparing: AtomicU64::new(0),
            held: Mutex::default(),
        })
    }

    /// The account of the request that this task works on. Work on another thread runs [within](Self::within) it.
    pub fn current() -> Arc<Account> {
        CURRENT.try_with(Arc::clone).unwrap_or_else(|_| Account::new())
    }

    /// Runs a task on a request.
    pub async fn scope<F: Future>(self: Arc<Account>, work: F) -> F::Output {
        CURRENT.scope(self, work).await
    }

    /// Runs a closure on a request, on a blocking thread.
    pub fn within<T>(self: Arc<Account>, work: impl FnOnce() -> T) -> T {
        CURRENT.sync_scope(self, work)
    }

    /// Takes so many more bytes.
    ///
    /// # Errors
    /// If there is no memory for them, or if the client has disconnected, so that useless work ends.
    pub fn add(&self, memory: &Arc<RequestMemory>, bytes: u64) -> Result<(), ApiError> {
        if self.left.load(Ordering::Relaxed) {
            return Err(ApiError::bad_request("the client has disconnected"));
        }
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let (used, memory) = (held.0, Arc::clone(held.1.get_or_insert_with(|| Arc::clone(memory))));
        memory.resize(used, used.saturating_add(bytes))?;
        held.0 += bytes;
        Ok(())
    }

    /// The same, and waits a while for memory that requests and conversations release.
    pub async fn add_when_free(&self, memory: &Arc<RequestMemory>, bytes: u64) -> Result<(), ApiError> {
        let end = Instant::now() + PATIENCE;
        loop {
            let freed = memory.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            match self.add(memory, bytes) {
                Err(error) if error.status == StatusCode::TOO_MANY_REQUESTS && Instant::now() < end => {
                    // Conversations do not report the memory that they release.
                    let _ = timeout_at(end.min(Instant::now() + LOOK), freed).await;
                }
                added => return added,
            }
        }
    }

    /// Releases so many bytes.
    pub fn remove(&self, bytes: u64) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let left = held.0.saturating_sub(bytes);
        if let Some(memory) = &held.1 {
            // Giving memory back does not fail.
            let _ = memory.resize(held.0, left);
        }
        held.0 = left;
    }

    /// Takes so many bytes until the result is dropped, and waits for them.
    pub async fn lend_when_free(
        self: &Arc<Account>,
        memory: &Arc<RequestMemory>,
        bytes: u64,
    ) -> Result<Loan, ApiError> {
        self.add_when_free(memory, bytes).await?;
        Ok(Loan { account: Arc::clone(self), bytes })
    }

    /// Sets the bytes for converting the body to a prompt.
    pub fn set_preparing(&self, bytes: u64) {
        self.preparing.store(bytes, Ordering::Relaxed);
    }

    pub fn preparing(&self) -> u64 {
        self.preparing.load(Ordering::Relaxed)
    }

    /// A guard for the task that waits for work on the request. Dropped before [`done`](Waiting::done), it records that the client
    /// has disconnected.
    pub fn waiting(self: &Arc<Account>) -> Waiting {
        Waiting { account: Arc::clone(self), is_done: false }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.remove(u64::MAX);
    }
}

/// Bytes of a request, released when this is dropped.
pub struct Loan {
    account: Arc<Account>,
    bytes: u64,
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.account.remove(self.bytes);
    }
}

/// See [`Account::waiting`].
pub struct Waiting {
    account: Arc<Account>,
    is_done: bool,
}

impl Waiting {
    pub fn done(mut self) {
        self.is_done = true;
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.is_done {
            self.account.left.store(true, Ordering::Relaxed);
        }
    }
}

/// The body of an answer. It keeps the memory of its request until it has been sent.
pub fn holding(body: Body, account: Arc<Account>) -> Body {
    Body::new(Holding { body, _account: account })
}

struct Holding {
    body: Body,
    _account: Arc<Account>,
}

impl http_body::Body for Holding {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An upper bound for the memory of a parsed JSON text, estimated from the separators of its values.
///
/// Each value takes the memory of the largest kind of value. Lists and objects start with room for four values and double it.
pub fn parsed_bytes(text: &[u8]) -> u64 {
    const VALUE: u64 = 150;
    const FIELD: u64 = 250;
    const OPENED: u64 = 4 * VALUE;
    let mut all = VALUE + 2 * text.len() as u64;
    let mut bytes = text.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'[' | b'{' => all += OPENED,
            b',' => all += VALUE,
            b':' => all += FIELD,
            b'"' => {
                while let Some(byte) = bytes.next() {
                    match byte {
                        b'\\' => drop(bytes.next()),
                        b'"' => break,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use forebay_engine::Options;

    use super::*;

    fn memory(budget: u64) -> Arc<RequestMemory> {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tales-qwen3moe-Q4_K_M.gguf");
        let options = Options::default().threads(1).memory(budget);
        Arc::new(RequestMemory::new(&Engine::open(&model, &options).unwrap()))
    }

    #[test]
    fn what_requests_hold_is_bounded_and_given_back() {
        let memory = memory(256 << 20);
        let (first, second) = (Account::new(), Account::new());
        first.add(&memory, 40 << 20).unwrap();
        let status = |result: Result<(), ApiError>| result.unwrap_err().status.as_u16();
        assert_eq!(status(second.add(&memory, 40 << 20)), 429, "it fits when the first is done");
        assert_eq!(status(second.add(&memory, 65 << 20)), 413, "it never fits");
        second.add(&memory, 20 << 20).unwrap();
        assert_eq!(memory.lock().used, 60 << 20);
        assert_eq!(memory.lock().counted.bytes(), 56 << 20);
        second.add(&memory, 1 << 20).unwrap();
        let loan = Loan { account: Arc::clone(&second), bytes: 1 << 20 };
        drop((first, loan));
        assert_eq!(memory.lock().used, 20 << 20);
        second.remove(17 << 20);
        assert_eq!(memory.lock().used, 3 << 20);
        assert_eq!(memory.lock().counted.bytes(), 0);
        drop(second.waiting());
        assert!(second.add(&memory, 1).is_err(), "nobody waits for it");
        drop(second);
        assert_eq!(memory.lock().used, 0);
    }

    #[test]
    fn large_requests_wait_while_the_process_has_all_it_may() {
        let full = || 250 << 20;
        let memory =
            Arc::new(RequestMemory { resident: full, ..Arc::into_inner(memory(256 << 20)).unwrap() });
        let (small, large) = (Account::new(), Account::new());
        small.add(&memory, 3 << 20).unwrap();
        assert_eq!(large.add(&memory, 10 << 20).unwrap_err().status.as_u16(), 429);
        large.add(&memory, 5 << 20).unwrap();
        assert_eq!(memory.lock().used, 8 << 20);
        // The process does not have these 5 MiB resident yet, but it will.
        assert_eq!(Account::new().add(&memory, 2 << 20).unwrap_err().status.as_u16(), 429);
    }

    #[tokio::test]
    async fn who_finds_no_memory_waits_for_it() {
        let memory = memory(256 << 20);
        let (first, second) = (Account::new(), Account::new());
        first.add(&memory, 60 << 20).unwrap();
        let waits = second.add_when_free(&memory, 10 << 20);
        let frees = async {
            tokio::task::yield_now().await;
            drop(first);
        };
        assert!(tokio::join!(waits, frees).0.is_ok());
    }

    #[test]
    fn estimates_are_above_what_parsing_takes() {
        /// What a value takes besides itself.
        fn size(value: &serde_json::Value) -> usize {
            use serde_json::Value;
            match value {
                Value::String(text) => text.capacity(),
                Value::Array(items) => {
                    items.capacity() * size_of::<Value>() + items.iter().map(size).sum::<usize>()
                }
                Value::Object(fields) => {
                    let each = size_of::<Value>() + size_of::<String>() + 24;
                    let room = if fields.is_empty() { 0 } else { (2 * fields.len()).max(4) };
                    room * each
                        + fields.iter().map(|(name, value)| name.capacity() + size(value)).sum::<usize>()
                }
                _ => 0,
            }
        }
        let many = |text: &str| format!("[{}]", vec![text; 10_000].join(","));
        let object = format!("{{{}}}", (0..9000).map(|i| format!("\"{i}\":0")).collect::<Vec<_>>().join(","));
        let texts =
            ["0", "[]", "{}", "\"\"", "{\"a\":0}", "\"text, with: marks [in it]\"", "\"\\\"\\\\\"", "[[1]]"];
        for text in
            texts.map(many).into_iter().chain([object, "7".into(), format!("\"{}\"", "a".repeat(9999))])
        {
            let value = serde_json::from_str(&text).unwrap();
            let (real, estimate) = (size(&value) + size_of_val(&value), parsed_bytes(text.as_bytes()));
            assert!(
                real as u64 <= estimate,
                "{real} bytes, {estimate} estimated: {}",
                &text[..20.min(text.len())]
            );
        }
        let prose = format!("\"{}\"", "a, b: [c]. ".repeat(1000));
        assert!(parsed_bytes(prose.as_bytes()) < 3 * prose.len() as u64, "marks in texts count for nothing");
    }
}
