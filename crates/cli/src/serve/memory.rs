//! What requests hold in memory: counted against the budget, bounded, and given back with the request.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use forebay_engine::{Bytes as Size, Engine, Hold};
use http_body::{Frame, SizeHint};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout_at};

use super::error::{ApiError, INSUFFICIENT_MEMORY};

/// All requests together hold at most the budget divided by this.
const SHARE: u64 = 4;

/// What the memory plan leaves to texts. Only what requests hold beyond it is counted, and comes from the memory of experts, in
/// steps: small requests do not push experts out.
const UNCOUNTED: u64 = 4 << 20;
const STEP: u64 = 1 << 20;

/// How long a request waits for memory that others hold, and how often it looks for it.
const PATIENCE: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(250);

/// What a request was granted is resident after so long.
const SOON: Duration = Duration::from_millis(200);

/// When there is no memory for a request, it may come again after so many seconds.
const RETRY_SECONDS: u64 = 5;

/// When requests have given so many bytes back, the allocator is asked to give them back to the system, a moment later: then the
/// last of them are free, and so are those of other requests. This is at most once in so long.
const MUCH: u64 = 1 << 20;
const LATER: Duration = Duration::from_secs(1);

/// What requests gave back since the allocator was asked last. The allocator is the whole process's, and so is this.
static FREED: AtomicU64 = AtomicU64::new(0);
static MUCH_FREED: Notify = Notify::const_new();

/// Gives the memory of requests that have been answered back to the system, for as long as the program runs.
pub async fn give_back_freed() {
    loop {
        MUCH_FREED.notified().await;
        sleep(LATER).await;
        FREED.store(0, Ordering::Relaxed);
        let _ = tokio::task::spawn_blocking(forebay_engine::internals::memory::give_back_freed).await;
    }
}

/// The memory of all requests to a model.
pub struct RequestMemory {
    most: u64,
    /// What the whole process may use, and how to see what it uses.
    budget: u64,
    resident: fn() -> u64,
    held: Mutex<Held>,
    /// Told when a request gives memory back.
    freed: Notify,
}

struct Held {
    /// By all requests.
    used: u64,
    /// What requests were granted within the last [`SOON`], and when: the process may not have it resident yet.
    granted: Vec<(Instant, u64)>,
    /// What of it the engine counts.
    counted: Hold,
}

impl RequestMemory {
    pub fn new(engine: &Engine) -> RequestMemory {
        let most = (engine.plan().budget / SHARE).max(UNCOUNTED);
        let held = Held { used: 0, granted: Vec::new(), counted: engine.hold_for_requests() };
        let (budget, resident) = (engine.plan().budget, forebay_engine::internals::memory::resident);
        RequestMemory { most, budget, resident, held: Mutex::new(held), freed: Notify::new() }
    }

    /// What a request holds goes from `from` bytes to `to`.
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
            // Giving memory back does not fail.
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

    /// Whether the process stays within its budget with so many bytes more, which are granted then. Not all that it takes can be
    /// counted: an allocator has gaps, and a program's own pages come as they are used.
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
            "the request takes {} of memory to answer, more than the {} that requests may take together: send less, or start \
             the server with more --memory",
            Size(bytes),
            Size(self.most)
        );
        let error = ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message);
        ApiError { code: Some(INSUFFICIENT_MEMORY), ..error }
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        // Numbers change together, after everything that can fail.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The memory that requests may take is taken by others.
pub fn busy() -> ApiError {
    let message = "other requests take the memory that this one needs: ask again in a while";
    let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
    ApiError { code: Some("rate_limit_exceeded"), ..error }.after(RETRY_SECONDS)
}

tokio::task_local! {
    static CURRENT: Arc<Account>;
}

/// What one request holds. It is shared by all who work on the request, and given back when the last of them is done.
pub struct Account {
    /// When the request came.
    pub started: Instant,
    /// Whether the client has left.
    left: AtomicBool,
    /// Bytes that making a prompt of the body takes.
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

    /// That of the request which is being worked on. Whoever works on it on another thread does so [within](Self::within) it.
    pub fn current() -> Arc<Account> {
        CURRENT.try_with(Arc::clone).unwrap_or_else(|_| Account::new())
    }

    /// Works on a request.
    pub async fn scope<F: Future>(self: Arc<Account>, work: F) -> F::Output {
        CURRENT.scope(self, work).await
    }

    /// Works on a request on a thread of another kind.
    pub fn within<T>(self: Arc<Account>, work: impl FnOnce() -> T) -> T {
        CURRENT.sync_scope(self, work)
    }

    /// Holds so many bytes more.
    ///
    /// # Errors
    /// If there is no memory for them, or if the client has left, so that work which nobody waits for ends.
    pub fn add(&self, memory: &Arc<RequestMemory>, bytes: u64) -> Result<(), ApiError> {
        if self.left.load(Ordering::Relaxed) {
            return Err(ApiError::bad_request("the client has left"));
        }
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let (used, memory) = (held.0, Arc::clone(held.1.get_or_insert_with(|| Arc::clone(memory))));
        memory.resize(used, used.saturating_add(bytes))?;
        held.0 += bytes;
        Ok(())
    }

    /// The same, and waits a while for requests and conversations to give memory back.
    pub async fn add_when_free(&self, memory: &Arc<RequestMemory>, bytes: u64) -> Result<(), ApiError> {
        let end = Instant::now() + PATIENCE;
        loop {
            let freed = memory.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            match self.add(memory, bytes) {
                Err(error) if error.status == StatusCode::TOO_MANY_REQUESTS && Instant::now() < end => {
                    // What conversations give back is not told.
                    let _ = timeout_at(end.min(Instant::now() + LOOK), freed).await;
                }
                added => return added,
            }
        }
    }

    /// Holds so many bytes fewer.
    pub fn remove(&self, bytes: u64) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let left = held.0.saturating_sub(bytes);
        if let Some(memory) = &held.1 {
            // Giving memory back does not fail.
            let _ = memory.resize(held.0, left);
        }
        held.0 = left;
    }

    /// Holds so many bytes for a while, when they are free.
    pub async fn lend_when_free(
        self: &Arc<Account>,
        memory: &Arc<RequestMemory>,
        bytes: u64,
    ) -> Result<Loan, ApiError> {
        self.add_when_free(memory, bytes).await?;
        Ok(Loan { account: Arc::clone(self), bytes })
    }

    /// Making a prompt of the body takes so many bytes.
    pub fn set_preparing(&self, bytes: u64) {
        self.preparing.store(bytes, Ordering::Relaxed);
    }

    pub fn preparing(&self) -> u64 {
        self.preparing.load(Ordering::Relaxed)
    }

    /// Goes along with whoever waits for work on the request: dropped before [`done`](Waiting::done), it says that the client has
    /// left.
    pub fn waiting(self: &Arc<Account>) -> Waiting {
        Waiting { account: Arc::clone(self), is_done: false }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.remove(u64::MAX);
    }
}

/// Bytes that a request holds until this is dropped.
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

/// The body of an answer, whose request's memory is held until it has been sent.
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

/// Bytes that a JSON text takes at most once it is read, as found by looking for what separates its values.
///
/// A value takes as much memory as the largest kind of value does. Lists and objects have room for four values at first, and grow by
/// doubling.
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
