//! Measures a step on the GPU, and its kernels: for one conversation, for several, and for a prompt.
//!
//! ```sh
//! cargo run --profile dist -p forebay-cuda --example profile -- MODEL [CONVERSATIONS…]
//! ```
//!
//! Steps are timed as they normally run, as graphs. Kernels are timed one by one, each after its predecessor has ended.
//! With `FOREBAY_GPU_APART=1`, kernels in graphs run one after the other, too.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use forebay_cuda::{Cuda, profile};
use forebay_engine::{Cancel, Engine, Options, Result, Session, TokenId, Turn};

/// Tokens of the prompt.
const PROMPT: usize = 512;

/// Steps to time.
const STEPS: usize = 64;

fn tokens(count: usize, from: usize) -> Vec<TokenId> {
    (0..count).map(|i| TokenId(((from + i) * 31 % 250) as u32)).collect()
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

fn print(what: &str, lines: &[profile::Line], times: usize) {
    let total: f64 = lines.iter().map(|line| line.micros).sum();
    println!("{what}: kernels one by one take {:.0} us", total / times as f64);
    for line in lines {
        let each = line.micros / line.count as f64;
        let (count, share) = (line.count / times, 100.0 * line.micros / total);
        println!("  {:20} {count:6} x {each:8.2} us  {share:5.1} %", line.name);
    }
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let model = args.next().expect("the path of a model");
    let mut counts: Vec<usize> = args.map(|n| n.parse().expect("a number of conversations")).collect();
    if counts.is_empty() {
        counts = vec![1, 8, 32];
    }
    let options = Options::default().device(Some(Arc::new(Cuda::open(0, None)?)));
    let engine = Engine::open(Path::new(&model), &options)?;

    for count in counts {
        let mut sessions: Vec<Session> = (0..count).map(|_| engine.session()).collect();
        for (i, session) in sessions.iter_mut().enumerate() {
            session.extend(&tokens(64, i))?;
        }
        // A sequence becomes a graph when it is repeated.
        (0..4).try_for_each(|number| step(&engine, &mut sessions, number))?;
        let start = Instant::now();
        (0..STEPS).try_for_each(|number| step(&engine, &mut sessions, number))?;
        let each = start.elapsed().as_secs_f64() / STEPS as f64;
        println!("{count} together: {:.0} us a step, {:.0} tokens a second", each * 1e6, count as f64 / each);
        profile::start();
        (0..3).try_for_each(|number| step(&engine, &mut sessions, number))?;
        print(&format!("{count} together"), &profile::stop(), 3);
    }

    for (number, timed) in [false, false, true].into_iter().enumerate() {
        if timed {
            profile::start();
        }
        let start = Instant::now();
        engine.session().extend(&tokens(PROMPT, number))?;
        let taken = start.elapsed().as_secs_f64();
        if timed {
            print("prompt", &profile::stop(), 1);
        } else {
            println!("prompt of {PROMPT}: {:.0} tokens a second", PROMPT as f64 / taken);
        }
    }
    Ok(())
}
