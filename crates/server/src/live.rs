//! `/live`: the activity of the server for the page, a few frames a second, only while a client watches.
//!
//! The first event is `machine`: the model, its layers with experts, the memory. Then a `frame` follows every quarter of a
//! second: counters, from which the page computes rates, and the changes of the experts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::response::Response;
use forebay_engine::Engine;
use forebay_engine::internals::experts::{Asked, Picture, Residency, Sight};
use forebay_engine::internals::forecast::place::of_loaded;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::sleep;

use crate::app::{App, leaving};
use crate::error::{ApiError, Retry};
use crate::memory::resident;
use crate::sse;

const FRAME: Duration = Duration::from_millis(250);

/// Clients that can watch at once.
const MOST: usize = 16;

static PLACES: Semaphore = Semaphore::const_new(MOST);

/// Streams the activity of the server until the client disconnects.
pub async fn live(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    if app.is_draining() {
        return Err(leaving());
    }
    let loaded = app.loaded()?;
    let (engine, compute) = (loaded.engine.clone(), loaded.compute.clone());
    let place = PLACES.try_acquire().map_err(|_| full())?;
    Ok(sse::respond(move |events| async move {
        let _place = place;
        events.named("machine", &machine(&app.model, &engine, &compute)).await?;
        let mut camera = Camera { start: Instant::now(), picture: Picture::default(), shown: Vec::new() };
        // During shutdown the stream ends, so that the server does not wait for it.
        while !app.is_draining() {
            events.named("frame", &camera.frame(&app, &engine)).await?;
            sleep(FRAME).await;
        }
        Ok(())
    }))
}

fn full() -> ApiError {
    let message = format!("{MOST} clients are reading /live already: close one of their pages");
    let error = ApiError::new(axum::http::StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
    ApiError { retry: Retry::After(30), ..error }
}

/// The facts that do not change.
fn machine(name: &str, engine: &Engine, compute: &str) -> Value {
    let plan = engine.plan();
    let layers = engine.routed_layers().iter().enumerate().filter(|(_, layer)| layer.experts > 0);
    let layers: Vec<_> = layers.map(|(index, layer)| [index, layer.experts, layer.used]).collect();
    json!({
        "model": name,
        "context": engine.context(),
        "compute": compute,
        // A GPU has its own threads.
        "threads": (!engine.is_on_device()).then(|| engine.threads()),
        "gpu": plan.device.as_ref().map(|device| json!({ "budget": device.budget, "planned": device.total() })),
        "io": (!layers.is_empty()).then(|| engine.io_description()),
        "layers": layers,
        "memory": { "budget": (plan.budget < u64::MAX).then_some(plan.budget), "dense": plan.dense },
        // Without a speed: to predict it, the drive and the CPUs would have to be measured for seconds when the server starts.
        "verdict": of_loaded(plan),
    })
}

/// What one client has received.
struct Camera {
    start: Instant,
    picture: Picture,
    /// The codes of the experts that the client has.
    shown: Vec<u8>,
}

impl Camera {
    fn frame(&mut self, app: &App, engine: &Engine) -> Value {
        engine.look(&mut self.picture);
        let codes: Vec<u8> = self.picture.experts().iter().map(code).collect();
        let changes = changes(&self.shown, &codes);
        self.shown = codes;
        let meters = engine.meters();
        let pulse = app.meters.pulse();
        json!({
            "at": self.start.elapsed().as_millis() as u64,
            "tokens": pulse.written,
            "prompt_tokens": pulse.read,
            "running": pulse.running,
            "waiting": pulse.waiting,
            "hits": meters.hits,
            "misses": meters.misses,
            "device_hits": meters.device_hits,
            "read": meters.bytes_read,
            "uploaded": meters.bytes_lifted,
            "slots": engine.slot_bytes(),
            "resident": resident(),
            "changes": base64(&changes),
        })
    }
}

/// An expert's code: two bits for its place, and two bits for hits and misses.
fn code(sight: &Sight) -> u8 {
    let place = match sight.place {
        Residency::Absent => 0,
        Residency::Arriving => 1,
        Residency::Resident => 2,
        Residency::Device => 3,
    };
    let asked = match sight.asked {
        Asked::Not => 0,
        Asked::Hit => 1,
        Asked::Missed => 2,
        Asked::Both => 3,
    };
    place | asked << 2
}

/// The changes from one row of codes to the next: a number of experts to skip, then the code of the next expert, and so on. 255
/// skips 255 experts and is followed by no code. Codes with a hit or a miss are always sent, because each is a new event. Before
/// the first row, all codes are zero.
fn changes(from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut passed = 0;
    for (i, &code) in to.iter().enumerate() {
        if code == from.get(i).copied().unwrap_or(0) && code < 4 {
            passed += 1;
            continue;
        }
        bytes.resize(bytes.len() + passed / 255, 255);
        bytes.extend([(passed % 255) as u8, code]);
        passed = 0;
    }
    bytes
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let byte = |i: usize| u32::from(three.get(i).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for i in 0..4 {
            let letter = char::from(LETTERS[(bits >> (18 - 6 * i)) as usize & 63]);
            text.push(if i <= three.len() { letter } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the page reads them.
    fn apply(codes: &mut [u8], changes: &[u8]) {
        let (mut at, mut bytes) = (0, changes.iter());
        while let Some(&byte) = bytes.next() {
            at += usize::from(byte);
            if byte < 255 {
                codes[at] = *bytes.next().unwrap();
                at += 1;
            }
        }
    }

    #[test]
    fn changes_lead_from_one_row_to_the_next() {
        let count = 1500;
        let mut shown = vec![0; count];
        let mut from = Vec::new();
        let mut random = 1u32;
        for step in 0..20 {
            // From nothing at all to everything, with long stretches of neither.
            let to = (0..count).map(|i| {
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                if i / 300 % 2 == step % 2 { 0 } else { [0, 2, 2, 9, 6, 8, 14][(random >> 16) as usize % 7] }
            });
            let to: Vec<u8> = to.collect();
            apply(&mut shown, &changes(&from, &to));
            assert_eq!(shown, to);
            from = to;
        }
        let still = vec![2; 10];
        assert!(changes(&still, &still).is_empty());
        assert_eq!(changes(&[6; 2], &[6; 2]), [0, 6, 0, 6], "what is hit again flashes again");
        for gap in [0, 1, 254, 255, 256, 510, 511] {
            let mut to = vec![0; gap];
            to.push(2);
            let mut shown = vec![0; gap + 1];
            apply(&mut shown, &changes(&[], &to));
            assert_eq!(shown, to, "{gap}");
        }
    }

    #[test]
    fn base64_is_as_everybody_has_it() {
        for (text, expected) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(text.as_bytes()), expected);
        }
        assert_eq!(base64(&[0xfb, 0xff, 0xfe]), "+//+");
    }
}
