//! Answers the messages of the engine that has the model's last layers.

use std::collections::HashMap;

use super::{Stage, StageSession, StageTurn};
use crate::blocks::Cancel;
use crate::chain::wire::{Call, Facts, Failure, Missing, Order, Reply, TurnCall, decode, encode};
use crate::chain::{Lost, Transport};
use crate::error::{Error, Result};

/// A stage with the conversations of one engine. It is what a [`Transport`] delivers its messages to.
///
/// As a [`Transport`] itself, it is a stage in the engine's own process.
///
/// [`Transport`] and [`Engine::after`](crate::Engine::after) have examples.
pub struct StageHost {
    stage: Stage,
    /// By number.
    sessions: HashMap<u64, StageSession>,
}

impl StageHost {
    pub(super) fn new(stage: Stage) -> StageHost {
        StageHost { stage, sessions: HashMap::new() }
    }

    /// The stage.
    pub fn stage(&self) -> &Stage {
        &self.stage
    }

    /// Does what a message asks for. Returns the reply.
    pub fn handle(&mut self, message: &[u8]) -> Vec<u8> {
        let replied = match decode::<Call<'_>>(message) {
            Ok((Call::Hello, _)) => {
                self.sessions.clear();
                self.facts().map(|facts| (Reply::Facts(facts), Vec::new()))
            }
            Ok((Call::Forward { orders, turns }, stream)) => {
                orders.into_iter().for_each(|order| self.obey(order));
                self.forward(&turns, &stream)
            }
            Err(_) => Err(Error::Invalid(
                "a message cannot be understood; run the same version of Forebay in all stages".into(),
            )),
        };
        let (reply, stream) = replied.unwrap_or_else(|error| match error {
            Error::DeviceLost(why) => (Reply::Lost(why), Vec::new()),
            error => (Reply::Failed(Failure::of(error)), Vec::new()),
        });
        encode(&reply, &stream)
    }

    fn facts(&self) -> Result<Facts> {
        let engine = &self.stage.0;
        Ok(Facts {
            span: self.stage.span(),
            model: engine.identity()?,
            hidden: self.stage.hidden(),
            chunk: engine.chunk(),
            context: engine.context(),
            conversation: engine.plan().kv,
        })
    }

    /// Orders about unknown conversations have no effect: the engine finds out when it wants to go on with them.
    fn obey(&mut self, order: Order) {
        match order {
            Order::Fork { from, to, len } => {
                let Some(from) = self.sessions.get_mut(&from) else { return };
                match from.fork(len) {
                    Ok(fork) => drop(self.sessions.insert(to, fork)),
                    Err(error) => tracing::debug!("a conversation will be computed again: {error}"),
                }
            }
            Order::Pin { conversation, len } => {
                self.sessions.entry(conversation).or_insert_with(|| self.stage.session()).pin(len);
            }
            Order::Forget { conversation } => drop(self.sessions.remove(&conversation)),
        }
    }

    fn forward(&mut self, turns: &[TurnCall<'_>], stream: &[f32]) -> Result<(Reply, Vec<f32>)> {
        let mut missing = Vec::new();
        for &TurnCall { conversation, start, .. } in turns {
            let stage = &self.stage;
            let session = self.sessions.entry(conversation).or_insert_with(|| stage.session());
            let have = session.reach(start);
            if have < start {
                missing.push(Missing { conversation, have });
            }
        }
        if !missing.is_empty() {
            return Ok((Reply::Missing(missing), Vec::new()));
        }
        let mut taken = Vec::new();
        for &TurnCall { conversation, start, .. } in turns {
            // A conversation that is named twice is new the second time.
            let mut session = self.sessions.remove(&conversation).unwrap_or_else(|| self.stage.session());
            session.rewind(start);
            taken.push(session);
        }
        let mut parts: Vec<_> = taken
            .iter_mut()
            .zip(turns)
            .map(|(session, turn)| StageTurn { session, tokens: &turn.tokens, marks: &turn.marks })
            .collect();
        let computed = self.stage.forward(&mut parts, stream, &Cancel::default());
        self.sessions.extend(turns.iter().map(|turn| turn.conversation).zip(taken));
        Ok((Reply::Through, computed?))
    }
}

impl Transport for StageHost {
    fn call(&mut self, message: &[u8]) -> Result<Vec<u8>, Lost> {
        Ok(self.handle(message))
    }

    fn restart(&mut self) -> Result<(), Lost> {
        Err(Lost("it is in this process and cannot be started again".into()))
    }
}
