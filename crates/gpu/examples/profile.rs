//! Measures a step on the GPU, and its kernels: for one conversation, for several, and for a prompt.
//!
//! ```sh
//! cargo run --profile dist -p forebay-gpu --example profile -- [LAYERS [CONVERSATIONS…]]
//! ```
//!
//! The model is made for this: one with so many layers of Qwen3-30B-A3B. Steps are timed as they normally run. Kernels
//! are timed one by one, each in a pass of its own.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use forebay_engine::internals::experts::Device;
use forebay_engine::internals::synth::{FAMILIES, Order, Shape, Synthesis, TypeChoice};
use forebay_engine::{Cancel, Engine, Options, Result, Session, TokenId, Turn};
use forebay_gpu::{HostTimes, Line, PortableGpu, Variants, find};

/// Tokens of the prompt.
const PROMPT: usize = 2048;

/// Steps to time.
const STEPS: usize = 64;

fn tokens(count: usize, from: usize) -> Vec<TokenId> {
    (0..count).map(|i| TokenId(((from + i) * 31 % 250) as u32)).collect()
}

/// Writes a model with this many layers.
fn synthesize(path: &Path, layers: u64) -> Result<()> {
    let order = Order {
        family: &FAMILIES[0],
        shape: Shape { layers: Some(layers), ..Shape::default() },
        changes: Vec::new(),
        types: TypeChoice::default(),
        vocabulary: 32_000,
        skew: 0.4,
        seed: 1,
    };
    let mut file = BufWriter::new(File::create(path).expect("a file for the model"));
    Synthesis::new(path, &order)?.write(&mut file, &Cancel::default(), &mut |_| ())
}

fn step(engine: &Engine, sessions: &mut [Session], number: usize) -> Result<()> {
    let next: Vec<Vec<TokenId>> = (0..sessions.len()).map(|i| tokens(1, 7 * i + number)).collect();
    let turns = sessions.iter_mut().zip(&next);
    let mut turns: Vec<Turn<'_>> =
        turns.map(|(session, tokens)| Turn { session, tokens, logits: true, marks: &[] }).collect();
    // Reads the likeliest tokens, because logits that are not read are not computed.
    let mut step = engine.step(&mut turns, &Cancel::default())?;
    while let Some((_, mut logits)) = step.next_row()? {
        logits.best()?;
    }
    step.finish()
}

fn print(what: &str, lines: &[Line], times: usize) {
    let total: f64 = lines.iter().map(|line| line.micros).sum();
    println!("{what}: kernels one by one take {:.0} us", total / times as f64);
    for line in lines {
        let each = line.micros / line.count as f64;
        let (count, share) = (line.count / times, 100.0 * line.micros / total);
        println!("  {:60} {count:6} x {each:8.2} us  {share:5.1} %", line.name);
    }
}

fn print_host(before: HostTimes, after: HostTimes, times: usize) {
    let [encoding, submitting, waiting] = [
        after.encoding - before.encoding,
        after.submitting - before.submitting,
        after.waiting - before.waiting,
    ]
    .map(|time| time.as_secs_f64() * 1e6 / times as f64);
    println!("  the host encodes {encoding:.0} us, submits {submitting:.0} us, waits {waiting:.0} us");
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1).map(|n| n.parse::<usize>().expect("a number"));
    let layers = args.next().unwrap_or(8);
    let mut counts: Vec<usize> = args.collect();
    if counts.is_empty() {
        counts = vec![1, 8, 32];
    }
    let folder = std::env::temp_dir().join(format!("forebay-profile-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for the model");
    let model = folder.join("model.gguf");
    let measured = synthesize(&model, layers as u64).and_then(|()| measure(&model, &counts));
    std::fs::remove_dir_all(&folder).expect("the model can be removed");
    measured
}

fn measure(model: &Path, counts: &[usize]) -> Result<()> {
    let gpu = Arc::new(PortableGpu::open(&find()?[0], None, Variants::ALL)?);
    println!("{}: {:.0} GB/s", gpu.name(), gpu.memory_speed()? / 1e9);
    let options = Options::default().device(Some(Arc::clone(&gpu) as Arc<dyn Device>));
    let engine = Engine::open(model, &options)?;

    for (number, timed) in [false, false, true].into_iter().enumerate() {
        if timed {
            gpu.start_profile()?;
        }
        let (start, before) = (Instant::now(), gpu.host_times());
        engine.session().extend(&tokens(PROMPT, number))?;
        let taken = start.elapsed().as_secs_f64();
        if timed {
            print("prompt", &gpu.stop_profile()?, 1);
        } else {
            println!("prompt of {PROMPT}: {:.0} tokens a second", PROMPT as f64 / taken);
            print_host(before, gpu.host_times(), 1);
        }
    }
    for &count in counts {
        let mut sessions: Vec<Session> = (0..count).map(|_| engine.session()).collect();
        for (i, session) in sessions.iter_mut().enumerate() {
            session.extend(&tokens(64, i))?;
        }
        // Experts may still be on their way to the GPU.
        (0..4 * STEPS).try_for_each(|number| step(&engine, &mut sessions, number))?;
        let (start, before) = (Instant::now(), gpu.host_times());
        (0..STEPS).try_for_each(|number| step(&engine, &mut sessions, number))?;
        let each = start.elapsed().as_secs_f64() / STEPS as f64;
        println!("{count} together: {:.0} us a step, {:.0} tokens a second", each * 1e6, count as f64 / each);
        print_host(before, gpu.host_times(), STEPS);
        gpu.start_profile()?;
        (0..3).try_for_each(|number| step(&engine, &mut sessions, number))?;
        print(&format!("{count} together"), &gpu.stop_profile()?, 3);
    }
    Ok(())
}
