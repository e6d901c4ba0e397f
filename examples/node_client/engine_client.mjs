// A client of pagewire's engine core, written from docs/ipc-protocol.md: token ids in, token ids out.
// It shows the protocol; unlike the Python EngineClient it does not connect again when the engine goes away.

import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

const PROTOCOL = 1;
const WINDOW = 64;
const SILENCE_LIMIT_MS = 3000; // the engine is heard twice a second

// Columns of integers travel as little-endian bytes; a copy, because they need not lie aligned in the message.
const int32 = (bytes) => Array.from(new Int32Array(Uint8Array.from(bytes).buffer));
const int64 = (bytes) => Array.from(new BigInt64Array(Uint8Array.from(bytes).buffer), Number);
const bytesOf = (ids) => new Uint8Array(Int32Array.from(ids).buffer);

export class EngineError extends Error {
  constructor(kind, detail) {
    super(detail);
    this.kind = kind; // invalid_request, context_length_exceeded, queue_full, unavailable, internal
  }
}

// One sequence. Iterate over it for {ids, finish, stopTokenId, usage}.
class Generation {
  #client;
  #news = [];
  #error = null;
  #ended = false;
  #wake = () => {};

  constructor(client, rid) {
    this.#client = client;
    this.rid = rid;
  }

  cancel() {
    if (!this.#ended) this.#client._send(["Cancel", [this.rid]]);
  }

  async *[Symbol.asyncIterator]() {
    for (;;) {
      while (this.#news.length) yield this.#news.shift();
      if (this.#error) throw this.#error;
      if (this.#ended) return;
      await new Promise((resolve) => (this.#wake = resolve));
    }
  }

  async ids() {
    const all = [];
    for await (const { ids } of this) all.push(...ids);
    return all;
  }

  _take(news) {
    this.#news.push(news);
    this.#ended = news.finish !== null;
    this.#wake();
  }

  _fail(error) {
    this.#error ??= error;
    this.#ended = true;
    this.#wake();
  }
}

export class EngineClient {
  #socket = new Dealer({ linger: 500 });
  #sending = Promise.resolve(); // one message after another
  #generations = new Map(); // rid → Generation, of what is open
  #nextRid = 1;
  #seq = 0;
  #heardAt = Date.now();
  #watch = null;
  #closed = false;

  static async connect(address, { name = "node", timeoutMs = 10_000 } = {}) {
    const client = new EngineClient();
    client.#socket.connect(address);
    const welcomed = new Promise((resolve, reject) => {
      client._welcomed = resolve;
      client._refused = reject;
    });
    client._send(["Hello", PROTOCOL, name, WINDOW]);
    client.#listen();
    const late = setTimeout(() => client._refused(new EngineError("unavailable", "No engine answers.")), timeoutMs);
    try {
      const [, , model, , vocabSize, maxModelLen, eosTokenIds] = await welcomed;
      client.facts = { model, vocabSize, maxModelLen, eosTokenIds };
    } catch (error) {
      client.close();
      throw error;
    } finally {
      clearTimeout(late);
    }
    client.#watch = setInterval(() => {
      if (Date.now() - client.#heardAt > SILENCE_LIMIT_MS) client.#lose("The engine is silent.");
    }, 250);
    return client;
  }

  // sampling: [temperature, top_k, top_p, min_p, repetition, presence, frequency penalty, logit_bias, seed, …];
  // what is left out at the end has its default.
  generate(promptIds, { sampling = [], maxTokens = null, stopTokenIds = [], ignoreEos = false, resumeIds = [] } = {}) {
    const generation = new Generation(this, this.#nextRid++);
    this.#generations.set(generation.rid, generation);
    const limits = [maxTokens, stopTokenIds, ignoreEos];
    const nothing = new Uint8Array();
    this._send([
      "Generate", generation.rid, 1, bytesOf(promptIds), sampling, limits, 0, nothing, "", bytesOf(resumeIds),
    ]);
    return generation;
  }

  // Gauges and counters of the engine: the next that arrive.
  snapshot() {
    return new Promise((resolve) => (this._onSnapshot = resolve));
  }

  async close() {
    if (this.#closed) return;
    this._send(["Bye"]);
    this.#lose("The client was closed.");
    await this.#sending;
    this.#socket.close();
  }

  _send(message) {
    if (this.#closed) return;
    this.#sending = this.#sending.then(() => this.#socket.send(encode(message))).catch(() => {});
  }

  #lose(reason) {
    clearInterval(this.#watch);
    this.#closed = true;
    for (const generation of this.#generations.values()) generation._fail(new EngineError("unavailable", reason));
    this.#generations.clear();
  }

  async #listen() {
    for await (const [data] of this.#socket) {
      this.#heardAt = Date.now();
      const message = decode(data);
      switch (message[0]) {
        case "Welcome":
          this._welcomed(message);
          break;
        case "News":
          this.#hear(message);
          break;
        case "Snapshot":
          this._onSnapshot?.({ step: message[1], numRunning: message[2], numWaiting: message[3] });
          break;
        case "Goodbye":
          this._refused(new EngineError("unavailable", message[1]));
          this.#lose(message[1]);
          break;
      }
    }
  }

  #hear([, seq, , rids, counts, ids, tokens, failed]) {
    if (seq !== this.#seq + 1) return this.#lose(`News ${this.#seq + 1} was lost.`);
    this.#seq = seq;
    const [numbers, columns] = [int32(counts), int32(ids)];
    int64(rids).forEach((rid, i) => this.#give(rid, { ids: columns.splice(0, numbers[i]), finish: null }));
    for (const [rid, data, , , finish, stopTokenId, usage] of tokens)
      this.#give(rid, { ids: int32(data), finish, stopTokenId, usage });
    for (const [, rid, kind, detail] of failed) {
      this.#generations.get(rid)?._fail(new EngineError(kind, detail));
      this.#generations.delete(rid);
    }
    if (seq % (WINDOW / 4) === 0) this._send(["Ack", seq]);
  }

  #give(rid, news) {
    this.#generations.get(rid)?._take(news);
    if (news.finish !== null) this.#generations.delete(rid);
  }
}
