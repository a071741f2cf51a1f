//! The OpenAI wire format: requests validated into engine requests, responses, stream chunks and errors.
