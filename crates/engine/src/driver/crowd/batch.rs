//! The batches of a step: which requests share one, and how it is computed.

use super::Share;
use super::member::Member;
use crate::blocks::Cancel;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::generate::{Choice, Writing};
use crate::session::Turn;

/// Where a batch failed.
pub enum Failure {
    /// Before it returned logits: it may be repeated.
    Pass(Error),
    /// With its logits. Some tokens may have been chosen already, so it must not be repeated.
    Logits(Error),
}

/// A batch that was computed.
pub struct Done {
    /// The number of each request, and its next token if its text so far is computed.
    pub chosen: Vec<(u64, Option<Result<Choice>>)>,
    /// Tokens that belong to prompts.
    pub prompt_rows: usize,
}

/// The parts of some requests, which are computed together.
struct Batch<'a> {
    turns: Vec<Turn<'a>>,
    writings: Vec<&'a mut Writing>,
    /// The number of each request.
    numbers: Vec<u64>,
    /// How each request can be cancelled, and its tokens.
    leaving: Vec<(Cancel, usize)>,
    prompt_rows: usize,
}

/// Divides the parts of a step into batches for a model with this many stages. Each stage computes one batch at a time,
/// so there should be as many. Prompts stay together, because each batch of a prompt uses nearly all experts.
pub fn divide_batches(parts: &[(Share, bool)], stages: usize) -> Vec<Vec<Share>> {
    if stages == 1 {
        return vec![parts.iter().map(|(part, _)| *part).collect()];
    }
    let (writing, reading): (Vec<_>, Vec<_>) = parts.iter().partition(|(_, writes)| *writes);
    // The longest batch goes first, and the others follow it through the stages.
    let mut batches: Vec<Vec<Share>> = Vec::new();
    if !reading.is_empty() {
        batches.push(reading.into_iter().map(|(part, _)| part).collect());
    }
    let first = batches.len();
    let places = (stages - first).min(writing.len());
    batches.resize(first + places, Vec::new());
    writing.into_iter().enumerate().for_each(|(i, (part, _))| batches[first + i % places].push(part));
    batches
}

/// Computes batches, all of them at the same time if there are several.
pub fn compute(
    engine: &Engine,
    active: &mut [Member],
    batches: &[Vec<Share>],
    cancel: &Cancel,
) -> Vec<Result<Done, Failure>> {
    let mut made: Vec<Batch<'_>> = batches.iter().map(|_| Batch::new()).collect();
    for member in active {
        for (batch, parts) in made.iter_mut().zip(batches) {
            if let Some(part) = parts.iter().find(|part| part.number == member.number) {
                batch.add(member, part.tokens);
                break;
            }
        }
    }
    if made.len() == 1 {
        return made.into_iter().map(|batch| batch.compute(engine, cancel)).collect();
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            made.into_iter().map(|batch| scope.spawn(move || batch.compute(engine, cancel))).collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.map(|done| done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

impl<'a> Batch<'a> {
    fn new() -> Batch<'a> {
        let (turns, writings, numbers, leaving) = Default::default();
        Batch { turns, writings, numbers, leaving, prompt_rows: 0 }
    }

    /// Adds the next tokens of a request.
    fn add(&mut self, member: &'a mut Member, count: usize) {
        self.prompt_rows += if member.writes() { 0 } else { count };
        self.leaving.push((member.cancel.clone(), count));
        self.numbers.push(member.number);
        let Member { session, text, marks, writing, .. } = member;
        let rest = &text[session.tokens().len()..];
        self.turns.push(Turn { session, tokens: &rest[..count], logits: count == rest.len(), marks });
        self.writings.push(writing);
    }

    /// Computes the tokens, and chooses the next ones. Stops early if most of the tokens belong to cancelled requests.
    fn compute(self, engine: &Engine, cancel: &Cancel) -> Result<Done, Failure> {
        let Batch { mut turns, mut writings, numbers, leaving, prompt_rows } = self;
        let rows: usize = leaving.iter().map(|(_, rows)| rows).sum();
        let all = cancel.clone();
        let gone =
            move || leaving.iter().filter(|(cancel, _)| cancel.is_cancelled()).map(|(_, n)| n).sum::<usize>();
        let give_up = Cancel::when(move || all.is_cancelled() || 2 * gone() > rows);
        let mut chosen: Vec<_> = numbers.into_iter().map(|number| (number, None)).collect();
        let mut step = engine.step(&mut turns, &give_up).map_err(Failure::Pass)?;
        while let Some((turn, mut logits)) = step.next_row().map_err(Failure::Logits)? {
            chosen[turn].1 = match writings[turn].choose(&mut logits) {
                // This concerns all requests.
                Err(error @ Error::DeviceLost(_)) => return Err(Failure::Logits(error)),
                choice => Some(choice),
            };
        }
        step.finish().map_err(Failure::Logits)?;
        Ok(Done { chosen, prompt_rows })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stage_has_a_batch() {
        let divided = |writes: &[bool], stages| -> Vec<Vec<u64>> {
            let parts = writes.iter().enumerate();
            let parts: Vec<_> =
                parts.map(|(i, &writes)| (Share { number: i as u64, tokens: 1 }, writes)).collect();
            let numbers = |batch: Vec<Share>| batch.into_iter().map(|share| share.number).collect();
            divide_batches(&parts, stages).into_iter().map(numbers).collect()
        };
        assert_eq!(divided(&[true, false, true], 1), [vec![0, 1, 2]]);
        assert_eq!(divided(&[true, true, true, true, true], 2), [vec![0, 2, 4], vec![1, 3]]);
        assert_eq!(divided(&[true, false, true, false, true], 3), [vec![1, 3], vec![0, 4], vec![2]]);
        assert_eq!(divided(&[true, false], 4), [vec![1], vec![0]]);
        assert_eq!(divided(&[false, false], 4), [vec![0, 1]]);
        assert_eq!(divided(&[true], 4), [vec![0]]);
    }
}
