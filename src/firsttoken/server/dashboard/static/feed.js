// The server's live feed: an event stream read by fetch, since an EventSource can send no key. Comes back by itself.

const STORED = "firsttoken.key";
const FIRST_WAIT_MS = 500, LONGEST_WAIT_MS = 15000;
// So long without a frame a connection is lost, whatever TCP thinks of it.
const SILENCE_MS = 8000;
// A page that nobody sees lets go of the feed after a while.
const HIDDEN_MS = 30000;

export function address(path) {
  return new URL(path, document.baseURI);
}

/** What the server's routes are asked with. */
export function headers() {
  const key = sessionStorage.getItem(STORED);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export class Feed {
  /** `on` has frame(object), lost(why, waitMs), back() and key(wrong): a key is asked for. */
  constructor(hz, on) {
    this.hz = hz;
    this.on = on;
    this.wait = FIRST_WAIT_MS;
    this.abort = null;
    this.timer = 0;
    this.hiddenTimer = 0;
    document.addEventListener("visibilitychange", () => this.seen());
  }

  start() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.abort?.abort();
    const abort = new AbortController();
    this.abort = abort;
    this.read(abort).catch((error) => {
      if (this.abort === abort) this.later(abort.signal.aborted ? "nothing came for some seconds" : error instanceof TypeError ? "the server does not answer" : error.message);
    });
  }

  /** Keep the key in this tab, and begin anew. */
  use(key) {
    sessionStorage.setItem(STORED, key);
    this.wait = FIRST_WAIT_MS;
    this.start();
  }

  async read(abort) {
    let alarm = setTimeout(() => abort.abort(), SILENCE_MS);
    try {
      const reply = await fetch(address(`dashboard/live?hz=${this.hz}`), { headers: headers(), signal: abort.signal, cache: "no-store" });
      if (reply.status === 401) {
        this.on.key(sessionStorage.getItem(STORED) !== null);
        return;
      }
      if (!reply.ok) throw new Error(await reason(reply));
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      const lines = new Lines();
      for (;;) {
        const { value, done } = await reader.read();
        if (done) throw new Error("the server ended the stream");
        clearTimeout(alarm);
        alarm = setTimeout(() => abort.abort(), SILENCE_MS);
        for (const line of lines.push(value)) {
          if (!line.startsWith("data: ")) continue;
          this.wait = FIRST_WAIT_MS;
          this.on.frame(JSON.parse(line.slice(6)));
        }
      }
    } finally {
      clearTimeout(alarm);
    }
  }

  later(why) {
    if (document.hidden) { this.abort = null; return; }
    const wait = this.wait * (0.8 + 0.4 * Math.random());
    this.wait = Math.min(this.wait * 2, LONGEST_WAIT_MS);
    this.on.lost(why, wait);
    this.timer = setTimeout(() => this.start(), wait);
  }

  seen() {
    clearTimeout(this.hiddenTimer);
    if (document.hidden) {
      this.hiddenTimer = setTimeout(() => {
        const abort = this.abort;
        this.abort = null;
        abort?.abort();
        clearTimeout(this.timer);
      }, HIDDEN_MS);
    } else if (this.abort === null) {
      this.start();
    }
  }
}

class Lines {
  constructor() { this.rest = ""; }

  push(text) {
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop();
    return lines;
  }
}

/** The message of an error answer. */
export async function reason(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `HTTP ${reply.status}`;
  }
}
