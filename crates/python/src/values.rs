//! The engine's values as Python values: the package's classes (`python/forebay/_values.py`) are made from these.

use forebay_engine::{Engine, Meters, Plan, Reply, ReplyEvent, Scored, Stats};
use pyo3::prelude::*;

/// The tuple for an event: its kind, its text, the id of a call, and the scores of tokens. `None` if Python is not told of
/// such events.
pub fn event<'py>(py: Python<'py>, event: &ReplyEvent) -> PyResult<Option<Bound<'py, PyAny>>> {
    let tuple = match event {
        ReplyEvent::Reasoning(text) => ("reasoning", text, "", Vec::new()),
        ReplyEvent::Content { text, scored } => ("content", text, "", scores(scored)),
        ReplyEvent::Call { id, name } => ("call", name, id.as_str(), Vec::new()),
        ReplyEvent::Arguments(text) => ("arguments", text, "", Vec::new()),
        ReplyEvent::Start(_) | ReplyEvent::Progress { .. } | ReplyEvent::End(_) => return Ok(None),
    };
    Ok(Some(tuple.into_pyobject(py)?.into_any()))
}

/// The tuple for the end of an answer.
pub fn end(py: Python<'_>, reply: Reply) -> PyResult<Bound<'_, PyAny>> {
    Ok(("end", Answer::of(reply)).into_pyobject(py)?.into_any())
}

/// The tuple for an answer that has no more events.
pub fn closed(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    Ok(("closed",).into_pyobject(py)?.into_any())
}

/// A token, its log probability, and the likeliest tokens with theirs.
type Score = (u32, f32, Vec<(u32, f32)>);

fn scores(scored: &[Scored]) -> Vec<Score> {
    let top = |scored: &Scored| scored.top.iter().map(|&(token, logprob)| (token.0, logprob)).collect();
    scored.iter().map(|scored| (scored.token.0, scored.logprob, top(scored))).collect()
}

#[derive(IntoPyObject)]
struct Answer {
    reasoning: String,
    content: String,
    calls: Vec<(String, String, String)>,
    tokens: Vec<u32>,
    finish_reason: &'static str,
    stop: Option<String>,
    seed: u64,
    logprobs: Vec<Score>,
    stats: AnswerStats,
}

impl Answer {
    fn of(reply: Reply) -> Answer {
        let Reply { reasoning, content, calls, answer, .. } = reply;
        Answer {
            reasoning,
            content,
            calls: calls.into_iter().map(|call| (call.id, call.name, call.arguments)).collect(),
            tokens: answer.tokens.iter().map(|token| token.0).collect(),
            finish_reason: answer.finish_reason.name(),
            stop: answer.stop,
            seed: answer.seed,
            logprobs: scores(&answer.logprobs),
            stats: AnswerStats::of(&answer.stats),
        }
    }
}

#[derive(IntoPyObject)]
struct AnswerStats {
    prompt_tokens: usize,
    reused_tokens: usize,
    prompt_seconds: f64,
    generated_tokens: usize,
    reasoning_tokens: usize,
    decode_steps: usize,
    decode_seconds: f64,
    ttft_seconds: f64,
    prompt_experts: ExpertMeters,
    experts: ExpertMeters,
}

impl AnswerStats {
    fn of(stats: &Stats) -> AnswerStats {
        AnswerStats {
            prompt_tokens: stats.prompt_tokens,
            reused_tokens: stats.reused_tokens,
            prompt_seconds: stats.prompt_seconds,
            generated_tokens: stats.generated_tokens,
            reasoning_tokens: stats.reasoning_tokens,
            decode_steps: stats.decode_steps,
            decode_seconds: stats.decode_seconds,
            ttft_seconds: stats.ttft_seconds,
            prompt_experts: ExpertMeters::of(&stats.prompt_experts),
            experts: ExpertMeters::of(&stats.experts),
        }
    }
}

/// What the expert store has counted.
#[derive(IntoPyObject)]
pub struct ExpertMeters {
    hits: u64,
    device_hits: u64,
    computed_in_memory: u64,
    misses: u64,
    bytes_used: u64,
    bytes_read: u64,
    bytes_uploaded: u64,
    sent_ahead: u64,
    sent_ahead_used: u64,
    prefetches: u64,
    prefetches_used: u64,
    expert_seconds: f64,
    read_seconds: f64,
    wait_seconds: f64,
    copy_wait_seconds: f64,
}

impl ExpertMeters {
    /// From the engine's.
    pub fn of(meters: &Meters) -> ExpertMeters {
        ExpertMeters {
            hits: meters.hits,
            device_hits: meters.device_hits,
            computed_in_memory: meters.computed_in_memory,
            misses: meters.misses,
            bytes_used: meters.bytes_used,
            bytes_read: meters.bytes_read,
            bytes_uploaded: meters.bytes_lifted,
            sent_ahead: meters.sent_ahead,
            sent_ahead_used: meters.sent_used,
            prefetches: meters.prefetches,
            prefetches_used: meters.prefetch_used,
            expert_seconds: meters.expert_seconds,
            read_seconds: meters.read_seconds,
            wait_seconds: meters.wait_seconds,
            copy_wait_seconds: meters.copy_wait_seconds,
        }
    }
}

/// The memory in use: tier, purpose, bytes.
pub fn memory(engine: &Engine) -> Vec<(&'static str, &'static str, u64)> {
    let entries = engine.memory().into_iter();
    entries.map(|entry| (entry.tier.name(), entry.purpose.name(), entry.bytes)).collect()
}

/// How memory is divided.
#[derive(IntoPyObject)]
pub struct MemoryPlan {
    budget: u64,
    total: u64,
    dense: u64,
    kv: u64,
    scratch: u64,
    requests: u64,
    process: u64,
    slots: usize,
    slot_bytes: u64,
    experts: usize,
    expert_bytes: u64,
    chunk: usize,
    context: usize,
    reserved: usize,
    streams: bool,
    device: Option<DeviceMemoryPlan>,
}

#[derive(IntoPyObject)]
struct DeviceMemoryPlan {
    budget: u64,
    total: u64,
    dense: u64,
    kv: u64,
    scratch: u64,
    slots: usize,
    slot_bytes: u64,
}

impl MemoryPlan {
    /// From the engine's.
    pub fn of(plan: &Plan) -> MemoryPlan {
        let device = plan.device.as_ref().map(|device| DeviceMemoryPlan {
            budget: device.budget,
            total: device.total(),
            dense: device.dense,
            kv: device.kv,
            scratch: device.scratch,
            slots: device.slot_count(),
            slot_bytes: device.slot_bytes,
        });
        MemoryPlan {
            budget: plan.budget,
            total: plan.total(),
            dense: plan.dense,
            kv: plan.kv,
            scratch: plan.scratch,
            requests: plan.requests,
            process: plan.process,
            slots: plan.slots.iter().sum(),
            slot_bytes: plan.slot_bytes,
            experts: plan.expert_count,
            expert_bytes: plan.experts,
            chunk: plan.chunk,
            context: plan.context,
            reserved: plan.reserved,
            streams: plan.streams(),
            device,
        }
    }
}
