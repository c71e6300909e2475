// A server to try the page with.

import { spawn } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

/** Starts `forebay serve` with the demo model unless `args` name another one, and waits until it answers. */
export async function serve(forebay, ...args) {
  if (!args.includes('--port')) args.push('--port', '0');
  // Its heat file and other caches go to a temporary folder.
  const cache = mkdtempSync(join(tmpdir(), 'page-test-'));
  const env = { ...process.env, XDG_CACHE_HOME: cache };
  const child = spawn(forebay, ['serve', ...args], { env, stdio: ['ignore', 'ignore', 'pipe'] });
  process.on('exit', () => {
    child.kill('SIGKILL');
    rmSync(cache, { recursive: true, force: true });
  });
  let log = '';
  const origin = await new Promise((resolve, reject) => {
    const limit = setTimeout(() => reject(new Error(`the server did not start:\n${log}`)), 60_000);
    child.stderr.on('data', (data) => {
      log += data;
      const found = /Listening at (http:\/\/\S+)\n/.exec(log);
      if (found) {
        clearTimeout(limit);
        resolve(found[1]);
      }
    });
    child.on('error', reject);
    child.on('exit', (code) => reject(new Error(`the server left with ${code}:\n${log}`)));
  });
  const ready = async () => {
    const response = await fetch(`${origin}/ready`, { headers: { authorization: 'Bearer sesame' } }).catch(() => null);
    await response?.text();
    return response?.ok;
  };
  for (let tries = 0; !(await ready()); tries++) {
    if (tries > 600) throw new Error(`the model is not loaded:\n${log}`);
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  return {
    origin,
    log: () => log,
    /** Asks it to leave, as a service manager would; gives its exit code. */
    async stop() {
      child.removeAllListeners('exit');
      const left = new Promise((resolve) => child.on('exit', resolve));
      const late = new Promise((resolve) => setTimeout(() => resolve('late'), 20_000).unref());
      child.kill('SIGTERM');
      const code = await Promise.race([left, late]);
      if (code === 'late') child.kill('SIGKILL');
      return code;
    },
  };
}
