//! The counters of the server, and the metrics for Prometheus.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use forebay_engine::driver::{Ending, Observer};
use forebay_engine::{Answer, Crowd, Engine, MemoryEntry, PrefixMeters};
use tokio::sync::oneshot;

use crate::app::share;
use crate::memory::resident;

/// A longer step counts as hanging. For a large streamed model, one chunk of a prompt reads the whole model from the drive, which
/// takes a minute or two.
const STALL: Duration = Duration::from_secs(300);

/// Upper bounds of the histogram of step durations, in seconds.
const STEP_CLASSES: [f64; 10] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];

/// Counted since the server started.
pub struct Meters {
    pub started: Instant,
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    /// Tokens generated and prompt tokens computed so far, including running answers.
    written: AtomicU64,
    read: AtomicU64,
    cancelled: AtomicU64,
    /// Answers running or waiting, by client.
    open: Mutex<HashMap<u128, usize>>,
    running: AtomicUsize,
    waiting: AtomicUsize,
    prefixes: Mutex<PrefixMeters>,
    steps: Mutex<Steps>,
    failed: AtomicU64,
    /// Whether no computation has succeeded since the last failure.
    failing: AtomicBool,
    dead: AtomicBool,
    /// Dropped when the driver's thread has ended.
    running_driver: Mutex<Option<oneshot::Sender<()>>>,
}

#[derive(Default)]
struct Steps {
    /// When the running step began, if one is running.
    since: Option<Instant>,
    count: u64,
    idle: u64,
    seconds: f64,
    classes: [u64; STEP_CLASSES.len()],
}

/// The counters for `/live`.
pub struct Pulse {
    /// Tokens generated so far.
    pub written: u64,
    /// Prompt tokens computed so far.
    pub read: u64,
    /// Answers being generated.
    pub running: usize,
    /// Answers waiting in the queue.
    pub waiting: usize,
}

/// One of a client's places; dropping it frees the place.
pub struct OpenPlace {
    meters: std::sync::Arc<Meters>,
    client: u128,
}

impl Drop for OpenPlace {
    fn drop(&mut self) {
        let mut open = lock(&self.meters.open);
        if let Some(places) = open.get_mut(&self.client) {
            *places -= 1;
            if *places == 0 {
                open.remove(&self.client);
            }
        }
    }
}

impl Default for Meters {
    fn default() -> Meters {
        Meters {
            started: Instant::now(),
            requests: Mutex::default(),
            prompt_tokens: AtomicU64::default(),
            cached_tokens: AtomicU64::default(),
            generated_tokens: AtomicU64::default(),
            written: AtomicU64::default(),
            read: AtomicU64::default(),
            cancelled: AtomicU64::default(),
            open: Mutex::default(),
            running: AtomicUsize::default(),
            waiting: AtomicUsize::default(),
            prefixes: Mutex::default(),
            steps: Mutex::default(),
            failed: AtomicU64::default(),
            failing: AtomicBool::default(),
            dead: AtomicBool::default(),
            running_driver: Mutex::default(),
        }
    }
}

impl Meters {
    /// Takes `count` places for a client. If that would be more than `most` places in total, or more than one client's [share] of
    /// them, returns how many are taken already.
    pub fn places(
        self: &std::sync::Arc<Meters>,
        client: u128,
        count: usize,
        most: usize,
    ) -> Result<Vec<OpenPlace>, usize> {
        let mut open = lock(&self.open);
        let all: usize = open.values().sum();
        let own = open.get(&client).copied().unwrap_or(0);
        for (open, most) in [(all, most), (own, share(most))] {
            if open.saturating_add(count) > most {
                return Err(open);
            }
        }
        open.insert(client, own + count);
        Ok((0..count).map(|_| OpenPlace { meters: std::sync::Arc::clone(self), client }).collect())
    }

    /// Answers running or waiting.
    pub fn open(&self) -> usize {
        lock(&self.open).values().sum()
    }

    /// Counts a response.
    pub fn request(&self, path: &'static str, status: u16) {
        *lock(&self.requests).entry((path, status)).or_default() += 1;
    }

    /// Counts an answer that has ended.
    pub fn answer(&self, answer: &Answer) {
        let stats = &answer.stats;
        self.prompt_tokens.fetch_add(stats.prompt_tokens as u64, Relaxed);
        self.cached_tokens.fetch_add(stats.reused_tokens as u64, Relaxed);
        self.generated_tokens.fetch_add(stats.generated_tokens as u64, Relaxed);
        if answer.finish_reason == forebay_engine::FinishReason::Cancelled {
            self.cancelled.fetch_add(1, Relaxed);
        }
    }

    /// Counts computed tokens of a prompt.
    pub fn read(&self, tokens: usize) {
        self.read.fetch_add(tokens as u64, Relaxed);
    }

    /// The present state.
    pub fn pulse(&self) -> Pulse {
        Pulse {
            written: self.written.load(Relaxed),
            read: self.read.load(Relaxed),
            running: self.running.load(Relaxed),
            waiting: self.waiting.load(Relaxed),
        }
    }

    /// Counts an answer that failed.
    pub fn failed(&self) {
        self.failed.fetch_add(1, Relaxed);
        self.failing.store(true, Relaxed);
    }

    /// Starts anew for a model that has been loaded. The receiver closes when the model's driver has ended.
    pub fn begin(&self) -> oneshot::Receiver<()> {
        self.failing.store(false, Relaxed);
        let (running, ended) = oneshot::channel();
        *lock(&self.running_driver) = Some(running);
        ended
    }

    /// Why the driver cannot answer requests at the moment, if so.
    pub fn ailment(&self) -> Option<&'static str> {
        if self.dead.load(Relaxed) {
            Some("the compute thread has ended: restart the server")
        } else if self.failing.load(Relaxed) {
            Some("the last computation failed: see the server's log")
        } else if lock(&self.steps).since.is_some_and(|since| since.elapsed() > STALL) {
            Some("a step has been running for more than five minutes")
        } else {
            None
        }
    }

    /// All metrics in the Prometheus text format.
    pub fn prometheus(&self, engine: Option<&Engine>) -> String {
        let mut text = Exposition::default();
        text.head("forebay_requests_total", "counter", "Requests by path and status.");
        for ((path, status), count) in &*lock(&self.requests) {
            text.line(&format!("forebay_requests_total{{path=\"{path}\",status=\"{status}\"}}"), *count);
        }
        let counters = [
            ("prompt_tokens_total", "Prompt tokens of completed answers.", &self.prompt_tokens),
            (
                "cached_tokens_total",
                "Prompt tokens that were reused from an earlier conversation.",
                &self.cached_tokens,
            ),
            ("generated_tokens_total", "Tokens generated in completed answers.", &self.generated_tokens),
            (
                "answers_cancelled_total",
                "Answers cancelled because their client disconnected.",
                &self.cancelled,
            ),
            ("answers_failed_total", "Answers that failed because of an error of the server.", &self.failed),
        ];
        for (name, help, value) in counters {
            text.number(name, "counter", help, value.load(Relaxed));
        }
        let gauges = [
            ("requests_running", "Answers being generated.", &self.running),
            ("requests_waiting", "Answers waiting in the queue.", &self.waiting),
        ];
        for (name, help, value) in gauges {
            text.number(name, "gauge", help, value.load(Relaxed) as u64);
        }
        text.number("requests_open", "gauge", "Answers running or waiting.", self.open() as u64);
        let steps = lock(&self.steps);
        text.head(
            "forebay_step_seconds",
            "histogram",
            "Duration of a step, which advances all running requests.",
        );
        for (count, end) in steps.classes.iter().zip(STEP_CLASSES) {
            text.line(&format!("forebay_step_seconds_bucket{{le=\"{end}\"}}"), *count);
        }
        text.line("forebay_step_seconds_bucket{le=\"+Inf\"}", steps.count);
        text.line("forebay_step_seconds_sum", steps.seconds);
        text.line("forebay_step_seconds_count", steps.count);
        let help = "Steps in which nothing was computed because all requests waited for files.";
        text.number("idle_steps_total", "counter", help, steps.idle);
        drop(steps);
        text.number(
            "uptime_seconds",
            "gauge",
            "Seconds since the server started.",
            self.started.elapsed().as_secs_f64(),
        );
        if let Some(bytes) = resident() {
            text.number("resident_bytes", "gauge", "Resident memory of the process.", bytes);
        }
        let prefixes = *lock(&self.prefixes);
        for (name, kind, help, value) in [
            ("entries", "gauge", "Conversations in the prefix cache in memory.", prefixes.entries as u64),
            ("bytes", "gauge", "Memory used by the prefix cache.", prefixes.bytes),
            (
                "disk_entries",
                "gauge",
                "Conversations in the prefix cache on disk.",
                prefixes.disk_entries as u64,
            ),
            ("disk_bytes", "gauge", "Disk space used by the prefix cache.", prefixes.disk_bytes),
            ("hits_total", "counter", "Prompts whose beginning was in the prefix cache.", prefixes.hits),
            (
                "misses_total",
                "counter",
                "Prompts whose beginning was not in the prefix cache.",
                prefixes.misses,
            ),
            (
                "tokens_total",
                "counter",
                "Prompt tokens reused from the prefix cache.",
                prefixes.tokens_reused,
            ),
            ("evictions_total", "counter", "Conversations evicted from memory.", prefixes.evictions),
            ("writes_total", "counter", "Conversations written to disk.", prefixes.writes),
            ("loads_total", "counter", "Conversations read from disk.", prefixes.loads),
            (
                "failures_total",
                "counter",
                "Files of the prefix cache that could not be written or read.",
                prefixes.failures,
            ),
        ] {
            text.number(&format!("prefix_{name}"), kind, help, value);
        }
        if let Some(engine) = engine {
            let meters = engine.meters();
            text.number(
                "expert_hits_total",
                "counter",
                "Expert requests that found the expert in memory (cache hits).",
                meters.hits,
            );
            text.number(
                "expert_misses_total",
                "counter",
                "Expert requests that had to wait for a read (cache misses).",
                meters.misses,
            );
            text.number(
                "expert_read_bytes_total",
                "counter",
                "Bytes of experts read from the drive.",
                meters.bytes_read,
            );
            if engine.plan().device.is_some() {
                let help = "Cache hits that found the expert in GPU memory.";
                text.number("expert_gpu_hits_total", "counter", help, meters.device_hits);
                let help = "Cache hits that the CPU computed (Options::cpu_experts).";
                text.number("expert_cpu_total", "counter", help, meters.computed_in_memory);
                let help = "Bytes of experts uploaded to the GPU.";
                text.number("expert_uploaded_bytes_total", "counter", help, meters.bytes_lifted);
                let help = "Seconds in which computing waited for uploads of experts to the GPU.";
                text.number("expert_copy_wait_seconds_total", "counter", help, meters.copy_wait_seconds);
            }
            let help = "Seconds in which computing waited for experts to be read.";
            text.number("expert_wait_seconds_total", "counter", help, meters.wait_seconds);
            text.head("forebay_memory_bytes", "gauge", "Memory by tier (computer or device) and purpose.");
            for MemoryEntry { tier, purpose, bytes } in engine.memory() {
                let labels = format!("tier=\"{}\",purpose=\"{}\"", tier.name(), purpose.name());
                text.line(&format!("forebay_memory_bytes{{{labels}}}"), bytes);
            }
            let help = "Memory currently reserved for experts.";
            text.number("expert_slot_bytes", "gauge", help, engine.slot_bytes());
            let budget = engine.plan().budget;
            if budget < u64::MAX {
                text.number("memory_budget_bytes", "gauge", "Memory budget of the process.", budget);
            }
        }
        text.0
    }
}

impl Observer for Meters {
    fn looks(&self, crowd: &Crowd) {
        self.running.store(crowd.running(), Relaxed);
        self.waiting.store(crowd.waiting(), Relaxed);
        *lock(&self.prefixes) = crowd.prefix_meters();
    }

    fn rests(&self) {
        lock(&self.steps).since = None;
    }

    fn begins_step(&self) {
        lock(&self.steps).since.get_or_insert_with(Instant::now);
    }

    fn ends_step(&self, took: Duration, tokens: usize) {
        self.written.fetch_add(tokens as u64, Relaxed);
        if tokens > 0 {
            self.failing.store(false, Relaxed);
        }
        let seconds = took.as_secs_f64();
        let mut steps = lock(&self.steps);
        steps.since = None;
        steps.count += 1;
        steps.seconds += seconds;
        for (class, end) in steps.classes.iter_mut().zip(STEP_CLASSES) {
            *class += u64::from(seconds <= end);
        }
    }

    /// The running step goes on.
    fn idles(&self) {
        lock(&self.steps).idle += 1;
    }

    fn ends(&self, ending: Ending) {
        if ending == Ending::Panicked {
            self.dead.store(true, Relaxed);
        }
        // The receiver is gone only if the program is ending.
        drop(lock(&self.running_driver).take());
    }
}

/// Text in the Prometheus format.
#[derive(Default)]
struct Exposition(String);

impl Exposition {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn line(&mut self, name: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.0, "{name} {value}");
    }

    fn number(&mut self, name: &str, kind: &str, help: &str, value: impl std::fmt::Display) {
        let name = format!("forebay_{name}");
        self.head(&name, kind, help);
        self.line(&name, value);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // The data are only numbers, so a poisoned lock is harmless.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
