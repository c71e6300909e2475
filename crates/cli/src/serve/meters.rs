//! What the server counts, and how it tells machines.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use forebay_engine::driver::{Ending, Observer};
use forebay_engine::{Answer, Crowd, Engine, MemoryEntry, PrefixMeters};
use tokio::sync::oneshot;

use super::app::share;
use crate::stats::resident;

/// A step that takes longer than this is taken for one that will not end. On a large model that is streamed, a chunk of a
/// prompt is one pass over the drive, which takes a minute or two.
const STALL: Duration = Duration::from_secs(300);

/// Upper ends of the classes that steps are counted in, in seconds.
const STEP_CLASSES: [f64; 10] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];

/// Counted since the server started.
pub struct Meters {
    pub started: Instant,
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    /// Tokens written and computed of prompts so far, those of answers that have not ended, too.
    written: AtomicU64,
    read: AtomicU64,
    cancelled: AtomicU64,
    /// Answers that were asked for and have not ended, by client.
    open: Mutex<HashMap<u128, usize>>,
    running: AtomicUsize,
    waiting: AtomicUsize,
    prefixes: Mutex<PrefixMeters>,
    steps: Mutex<Steps>,
    failed: AtomicU64,
    /// Whether nothing was computed since the last failure.
    failing: AtomicBool,
    dead: AtomicBool,
    /// Dropped when the driver's thread has ended.
    running_driver: Mutex<Option<oneshot::Sender<()>>>,
}

#[derive(Default)]
struct Steps {
    /// Since when somebody waits for a step to be computed, if somebody does.
    since: Option<Instant>,
    count: u64,
    idle: u64,
    seconds: f64,
    classes: [u64; STEP_CLASSES.len()],
}

/// What onlookers are told.
pub struct Pulse {
    /// Tokens written so far.
    pub written: u64,
    /// Tokens of prompts that were computed so far.
    pub read: u64,
    /// Answers being written.
    pub running: usize,
    /// Answers that wait for others to end.
    pub waiting: usize,
}

/// A client's share of what may be open at once; it ends when it is dropped.
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
    /// Places for so many of a client's answers, unless that would be more than `most` in all, or more than one client's
    /// [share] of them; then how many are in the way.
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

    /// Answers that have not ended.
    pub fn open(&self) -> usize {
        lock(&self.open).values().sum()
    }

    /// A response was given.
    pub fn request(&self, path: &'static str, status: u16) {
        *lock(&self.requests).entry((path, status)).or_default() += 1;
    }

    /// An answer ended.
    pub fn answer(&self, answer: &Answer) {
        let stats = &answer.stats;
        self.prompt_tokens.fetch_add(stats.prompt_tokens as u64, Relaxed);
        self.cached_tokens.fetch_add(stats.reused_tokens as u64, Relaxed);
        self.generated_tokens.fetch_add(stats.generated_tokens as u64, Relaxed);
        if answer.finish_reason == forebay_engine::FinishReason::Cancelled {
            self.cancelled.fetch_add(1, Relaxed);
        }
    }

    /// So many more tokens of a prompt were computed.
    pub fn read(&self, tokens: usize) {
        self.read.fetch_add(tokens as u64, Relaxed);
    }

    /// What goes on at the moment.
    pub fn pulse(&self) -> Pulse {
        Pulse {
            written: self.written.load(Relaxed),
            read: self.read.load(Relaxed),
            running: self.running.load(Relaxed),
            waiting: self.waiting.load(Relaxed),
        }
    }

    /// An answer could not be computed.
    pub fn failed(&self) {
        self.failed.fetch_add(1, Relaxed);
        self.failing.store(true, Relaxed);
    }

    /// A model has been loaded: what failed before says nothing of it. Gives what comes to nothing when its driver has ended.
    pub fn begin(&self) -> oneshot::Receiver<()> {
        self.failing.store(false, Relaxed);
        let (running, ended) = oneshot::channel();
        *lock(&self.running_driver) = Some(running);
        ended
    }

    /// Why nothing can be expected of the driver, if nothing can.
    pub fn ailment(&self) -> Option<&'static str> {
        if self.dead.load(Relaxed) {
            Some("computing failed for good: start the server again")
        } else if self.failing.load(Relaxed) {
            Some("computing failed; the server's log says why")
        } else if lock(&self.steps).since.is_some_and(|since| since.elapsed() > STALL) {
            Some("a step has not ended for a long time")
        } else {
            None
        }
    }

    /// Everything in Prometheus's text format.
    pub fn prometheus(&self, engine: Option<&Engine>) -> String {
        let mut text = Exposition::default();
        text.head("forebay_requests_total", "counter", "Requests by path and status.");
        for ((path, status), count) in &*lock(&self.requests) {
            text.line(&format!("forebay_requests_total{{path=\"{path}\",status=\"{status}\"}}"), *count);
        }
        let counters = [
            ("prompt_tokens_total", "Tokens of prompts.", &self.prompt_tokens),
            ("cached_tokens_total", "Of those, the ones that were not computed again.", &self.cached_tokens),
            ("generated_tokens_total", "Tokens written.", &self.generated_tokens),
            ("answers_cancelled_total", "Answers whose client went away.", &self.cancelled),
            ("answers_failed_total", "Answers that could not be computed.", &self.failed),
        ];
        for (name, help, value) in counters {
            text.number(name, "counter", help, value.load(Relaxed));
        }
        let gauges = [
            ("requests_running", "Answers being written.", &self.running),
            ("requests_waiting", "Answers that wait for others to end.", &self.waiting),
        ];
        for (name, help, value) in gauges {
            text.number(name, "gauge", help, value.load(Relaxed) as u64);
        }
        text.number("requests_open", "gauge", "Answers that have not ended.", self.open() as u64);
        let steps = lock(&self.steps);
        text.head("forebay_step_seconds", "histogram", "Time of a step that all requests take together.");
        for (count, end) in steps.classes.iter().zip(STEP_CLASSES) {
            text.line(&format!("forebay_step_seconds_bucket{{le=\"{end}\"}}"), *count);
        }
        text.line("forebay_step_seconds_bucket{le=\"+Inf\"}", steps.count);
        text.line("forebay_step_seconds_sum", steps.seconds);
        text.line("forebay_step_seconds_count", steps.count);
        let help = "Steps in which nothing could be computed, because all requests waited for files.";
        text.number("idle_steps_total", "counter", help, steps.idle);
        drop(steps);
        text.number("uptime_seconds", "gauge", "Since the start.", self.started.elapsed().as_secs_f64());
        if let Some(bytes) = resident() {
            text.number("resident_bytes", "gauge", "Memory of the process.", bytes);
        }
        let prefixes = *lock(&self.prefixes);
        for (name, kind, help, value) in [
            ("entries", "gauge", "Conversations kept in memory.", prefixes.entries as u64),
            ("bytes", "gauge", "Memory that they take.", prefixes.bytes),
            ("disk_entries", "gauge", "Conversations kept on disk.", prefixes.disk_entries as u64),
            ("disk_bytes", "gauge", "What they take there.", prefixes.disk_bytes),
            ("hits_total", "counter", "Prompts that began like something kept.", prefixes.hits),
            ("misses_total", "counter", "Prompts that did not.", prefixes.misses),
            ("tokens_total", "counter", "Tokens that were not computed again.", prefixes.tokens_reused),
            ("evictions_total", "counter", "Conversations that left memory.", prefixes.evictions),
            ("writes_total", "counter", "Conversations written to disk.", prefixes.writes),
            ("loads_total", "counter", "Conversations read from disk.", prefixes.loads),
            ("failures_total", "counter", "Files that could not be written or used.", prefixes.failures),
        ] {
            text.number(&format!("prefix_{name}"), kind, help, value);
        }
        if let Some(engine) = engine {
            let meters = engine.meters();
            text.number("expert_hits_total", "counter", "Experts found in memory.", meters.hits);
            text.number("expert_misses_total", "counter", "Experts waited for.", meters.misses);
            text.number("expert_read_bytes_total", "counter", "Bytes of experts read.", meters.bytes_read);
            if engine.plan().device.is_some() {
                let help = "Of those found in memory, experts found in the GPU's.";
                text.number("expert_gpu_hits_total", "counter", help, meters.device_hits);
                let help = "Of those found in memory, experts that the processor computed (--cpu-experts).";
                text.number("expert_cpu_total", "counter", help, meters.computed_in_memory);
                let help = "Bytes of experts brought to the GPU.";
                text.number("expert_lifted_bytes_total", "counter", help, meters.bytes_lifted);
                let help =
                    "Time in which nothing could be started because experts were on their way to the GPU.";
                text.number("expert_copy_wait_seconds_total", "counter", help, meters.copy_wait_seconds);
            }
            let help = "Time in which nothing could be computed for want of experts.";
            text.number("expert_wait_seconds_total", "counter", help, meters.wait_seconds);
            text.head(
                "forebay_memory_bytes",
                "gauge",
                "What memory is used for, in the computer and on the GPU.",
            );
            for MemoryEntry { tier, purpose, bytes } in engine.memory() {
                let labels = format!("tier=\"{}\",purpose=\"{}\"", tier.name(), purpose.name());
                text.line(&format!("forebay_memory_bytes{{{labels}}}"), bytes);
            }
            let help = "Memory for experts at the moment.";
            text.number("expert_slot_bytes", "gauge", help, engine.slot_bytes());
            let budget = engine.plan().budget;
            if budget < u64::MAX {
                text.number("memory_budget_bytes", "gauge", "What the process may use.", budget);
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

    /// Whoever waits for a step still waits.
    fn idles(&self) {
        lock(&self.steps).idle += 1;
    }

    fn ends(&self, ending: Ending) {
        if ending == Ending::Panicked {
            self.dead.store(true, Relaxed);
        }
        // Where nobody waits for it, the program leaves already.
        drop(lock(&self.running_driver).take());
    }
}

/// Text for Prometheus.
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
    // Numbers alone: half a change does no harm.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
