//! What a run took: a line for people, an object for machines.

use std::io::IsTerminal;

use forebay_engine::experts::Meters;
use forebay_engine::forecast::bound::{Bottleneck, Bound, TokenCost};
use forebay_engine::{Answer, Engine, FinishReason, Reply, Stats};
use serde_json::{Value, json};

/// Closes an answer with a line on stderr, where that is a terminal.
pub fn close(engine: &Engine, answer: &Answer) {
    // An answer that was stopped while its prompt was read has nothing to measure.
    let begun = answer.finish_reason != FinishReason::Cancelled || !answer.tokens.is_empty();
    if begun && std::io::stderr().is_terminal() {
        eprintln!("\n{}", line_of(engine, answer));
    }
}

/// The line for an answer.
pub fn line_of(engine: &Engine, answer: &Answer) -> String {
    let streams = engine.plan().moves_experts();
    line(&answer.stats, streams, bound(engine, &answer.stats))
}

/// What bounded the writing of an answer, and the share of it that was reached.
fn bound(engine: &Engine, stats: &Stats) -> Option<(Bound, f64)> {
    if stats.decode_steps == 0 {
        return None;
    }
    // Where the drive fails now, the answer is there all the same.
    let speeds = engine.speeds().ok()?;
    let cost = TokenCost::new(stats.decode_steps, stats.decode_seconds, &stats.experts);
    let bound = Bound::of(&cost, &speeds)?;
    Some((bound, bound.ratio(&cost)))
}

fn line(stats: &Stats, streams: bool, bound: Option<(Bound, f64)>) -> String {
    let mut parts = Vec::new();
    if stats.decode_steps > 0 {
        parts.push(format!("{:.1} tok/s", stats.steps_per_second()));
    }
    if stats.generated_tokens > 0 {
        parts.push(format!("first token {:.1} s", stats.ttft_seconds));
    }
    if let Some(hit_rate) = stats.experts.hit_rate().filter(|_| streams) {
        let per_token = |bytes: u64| decimal(bytes as f64 / stats.decode_steps.max(1) as f64);
        match stats.experts.device_hit_rate().filter(|_| stats.experts.bytes_lifted > 0) {
            Some(on_gpu) => {
                let (on_gpu, in_memory) = (100.0 * on_gpu, 100.0 * (hit_rate - on_gpu));
                parts.push(format!("experts {on_gpu:.0}% on the GPU, {in_memory:.0}% in memory"));
                parts.push(format!("{}/tok to the GPU", per_token(stats.experts.bytes_lifted)));
                parts.push(format!("{}/tok from the drive", per_token(stats.experts.bytes_read)));
            }
            None => {
                parts.push(format!("experts {:.0}% hit", hit_rate * 100.0));
                parts.push(format!("{}/tok", per_token(stats.experts.bytes_read)));
            }
        }
        if stats.experts.computed_in_memory > 0 {
            let all = stats.experts.hits + stats.experts.misses;
            let share = 100.0 * stats.experts.computed_in_memory as f64 / all as f64;
            parts.push(format!("{share:.0}% computed on the processor (other bits)"));
        }
    }
    if let Some((bound, ratio)) = bound {
        let by = if bound.by == Bottleneck::Drive { "disk" } else { bound.by.name() };
        parts.push(format!("{by}-bound ({:.0}% of bound)", 100.0 * ratio));
    }
    if stats.generated_tokens == 0 {
        let computed = stats.prompt_tokens - stats.reused_tokens;
        parts.push(format!("prompt {computed} tok at {:.0} tok/s", rate(computed, stats.prompt_seconds)));
    }
    parts.join(" · ")
}

/// `0.46 GB`, or `3.1 MB` where it is little: in powers of ten, as drives are sold and measured.
fn decimal(bytes: f64) -> String {
    if bytes >= 1e7 { format!("{:.2} GB", bytes / 1e9) } else { format!("{:.1} MB", bytes / 1e6) }
}

/// An answer as JSON.
pub fn answer(engine: &Engine, reply: &Reply) -> Value {
    let answer = &reply.answer;
    let stats = &answer.stats;
    let bound = bound(engine, stats).map(|(bound, ratio)| {
        json!({ "name": bound.by.name(), "tokens_per_second": bound.tokens_per_second, "ratio": ratio })
    });
    json!({
        "text": reply.content,
        "reasoning": (!reply.reasoning.is_empty()).then_some(&reply.reasoning),
        "tokens": answer.tokens,
        "finish_reason": answer.finish_reason.name(),
        "seed": answer.seed,
        "stats": {
            "prompt_tokens": stats.prompt_tokens,
            "reused_tokens": stats.reused_tokens,
            "prompt_seconds": stats.prompt_seconds,
            "generated_tokens": stats.generated_tokens,
            "decode_steps": stats.decode_steps,
            "decode_seconds": stats.decode_seconds,
            "ttft_seconds": stats.ttft_seconds,
            "experts": experts(&stats.experts, stats.decode_steps),
            "prompt_experts": experts(&stats.prompt_experts, stats.prompt_tokens - stats.reused_tokens),
            "memory": {
                "budget": engine.plan().budget,
                "planned": engine.plan().total(),
                "expert_slots": engine.slot_bytes(),
                "peak_rss": peak_rss(),
            },
            "bound": bound,
        },
    })
}

/// What the expert store did for so many tokens.
fn experts(meters: &Meters, tokens: usize) -> Value {
    json!({
        "hits": meters.hits,
        "gpu_hits": meters.device_hits,
        "cpu_experts": meters.computed_in_memory,
        "misses": meters.misses,
        "hit_rate": meters.hit_rate(),
        "bytes_read": meters.bytes_read,
        "bytes_per_token": (tokens > 0).then(|| meters.bytes_read as f64 / tokens as f64),
        "bytes_lifted": meters.bytes_lifted,
        "copy_wait_seconds": meters.copy_wait_seconds,
        "sent_ahead": meters.sent_ahead,
        "sent_ahead_used": meters.sent_used,
        "prefetches": meters.prefetches,
        "prefetches_used": meters.prefetch_used,
        "read_seconds": meters.read_seconds,
        "wait_seconds": meters.wait_seconds,
    })
}

/// The most memory this process has had resident, in bytes, where the operating system tells.
fn peak_rss() -> Option<u64> {
    status("VmHWM:")
}

/// The memory that this process has resident, in bytes, where the operating system tells.
pub fn resident() -> Option<u64> {
    status("VmRSS:")
}

fn status(name: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

fn rate(tokens: usize, seconds: f64) -> f64 {
    if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_counts_what_was_computed() {
        let stats = Stats {
            prompt_tokens: 30,
            reused_tokens: 10,
            prompt_seconds: 0.5,
            generated_tokens: 51,
            decode_steps: 50,
            decode_seconds: 4.0,
            ttft_seconds: 0.5,
            experts: Meters {
                hits: 3,
                misses: 1,
                bytes_read: 100 << 20,
                wait_seconds: 2.0,
                ..Meters::default()
            },
            ..Stats::default()
        };
        let bound = Bound { by: Bottleneck::Drive, tokens_per_second: 15.0 };
        assert_eq!(line(&stats, false, None), "12.5 tok/s · first token 0.5 s");
        assert_eq!(
            line(&stats, true, Some((bound, 0.83))),
            "12.5 tok/s · first token 0.5 s · experts 75% hit · 2.1 MB/tok · disk-bound (83% of bound)"
        );
        let much = Stats { experts: Meters { bytes_read: 23 << 30, ..stats.experts }, ..stats };
        assert!(line(&much, true, None).ends_with(" · 0.49 GB/tok"));
        let lifted =
            Meters { hits: 9, misses: 1, device_hits: 6, bytes_lifted: 50 << 20, ..Meters::default() };
        let line_of_gpu = line(&Stats { experts: lifted, ..stats }, true, None);
        let expected =
            " · experts 60% on the GPU, 30% in memory · 1.0 MB/tok to the GPU · 0.0 MB/tok from the drive";
        assert!(line_of_gpu.ends_with(expected), "{line_of_gpu}");
        let nothing = Stats { generated_tokens: 0, decode_steps: 0, experts: Meters::default(), ..stats };
        assert_eq!(line(&nothing, true, None), "prompt 20 tok at 40 tok/s");
    }
}
