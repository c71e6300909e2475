//! `/v1/models`: the model, in a form that clients of OpenAI and of Anthropic can read.

use std::sync::Arc;

use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::app::App;
use crate::body::Json;
use crate::dates::rfc3339;
use crate::error::ApiError;

/// Lists the models.
pub async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let id = app.model.as_str();
    Json(json!({ "object": "list", "data": [model(&app)], "has_more": false, "first_id": id, "last_id": id }))
}

/// Describes a model by its id.
pub async fn get(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    if id == app.model {
        return Ok(Json(model(&app)));
    }
    let message = format!("the model {id:?} does not exist here; this server has {:?}", app.model);
    Err(ApiError {
        code: Some("model_not_found"),
        param: Some("model".into()),
        ..ApiError::not_found(message)
    })
}

fn model(app: &App) -> Value {
    let mut model = json!({
        "id": app.model, "object": "model", "created": app.created, "owned_by": "forebay",
        "type": "model", "display_name": app.model, "created_at": rfc3339(app.created),
    });
    if let Ok(loaded) = app.loaded() {
        model["context_length"] = loaded.engine.context().into();
        model["max_model_len"] = loaded.engine.context().into();
    }
    model
}
