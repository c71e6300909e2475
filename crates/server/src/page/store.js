// Conversations, kept in the browser: in IndexedDB, or for as long as the page lives where that is refused.

const opened = new Promise((resolve) => {
  let request;
  try {
    request = indexedDB.open('forebay', 1);
  } catch {
    resolve(null);
    return;
  }
  request.onupgradeneeded = () => request.result.createObjectStore('conversations', { keyPath: 'id' });
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => resolve(null);
  request.onblocked = () => resolve(null);
});

const memory = new Map();

/** Whether what is written is there after a reload. */
export const lasting = opened.then((database) => database !== null);

async function ask(mode, action) {
  const database = await opened;
  if (!database) return null;
  return new Promise((resolve, reject) => {
    const transaction = database.transaction('conversations', mode);
    const request = action(transaction.objectStore('conversations'));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}

/** All conversations, the latest first. */
export async function all() {
  const found = (await ask('readonly', (store) => store.getAll())) ?? [...memory.values()];
  return found.sort((a, b) => b.updated - a.updated);
}

export async function save(conversation) {
  memory.set(conversation.id, conversation);
  await ask('readwrite', (store) => store.put(conversation));
}

export async function remove(id) {
  memory.delete(id);
  await ask('readwrite', (store) => store.delete(id));
}

/** Small things that outlive a visit, such as the last settings. */
export const preferences = {
  get(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(`forebay.${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`forebay.${name}`, JSON.stringify(value));
    } catch {
      // A browser that keeps nothing forgets settings, and that is its choice.
    }
  },
};
