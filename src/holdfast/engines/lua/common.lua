-- In front of every script: the layout, the time, the form of an entry.
--
-- An entry is text: version, created, updated, expiry (or nothing), owner, tag, each on a line, then the value.
-- Numbers are passed on as the text they are: a Lua number is a double, and `..` rounds it to 14 digits. Servers of 32
-- bits are refused, so '%d' is exact to 2^53.

local LAYOUT = '1'
local CHUNK = 1000 -- arguments given to one command; unpack() ends near 8,000

local function text(number)
  return string.format('%d', number)
end

-- The space's present: the caller's clock, or the server's when the caller has none, and never before its last commit.
local function present(clock, time)
  local now
  if clock == '' then
    local seconds = redis.call('TIME')
    now = tonumber(seconds[1]) * 1000 + math.floor(tonumber(seconds[2]) / 1000)
  else
    now = tonumber(clock)
  end
  return math.max(now, tonumber(time or 0))
end

-- When an entry expires, or nil.
local function expiry_of(raw)
  return tonumber((string.match(raw, '^%d+\n%-?%d+\n%-?%d+\n(%-?%d*)\n')))
end

local function parse(raw)
  local version, created, updated, expires, owner, tag, start =
    string.match(raw, '^(%d+)\n(%-?%d+)\n(%-?%d+)\n(%-?%d*)\n([^\n]*)\n([^\n]*)\n()')
  if not version then
    error('HFDAMAGED an entry is not in the form of layout ' .. LAYOUT)
  end
  return {
    version = version, created = created, updated = updated, expires = tonumber(expires),
    owner = owner, tag = tag, size = #raw - start + 1, raw = raw, start = start,
  }
end

-- Whether a script may work on this space: it is of our layout, or there is none yet.
local function foreign(layout)
  if layout and layout ~= LAYOUT then
    return redis.error_reply('HFLAYOUT ' .. layout)
  end
end

-- One command with any number of arguments, a few at a time; `step` arguments belong together.
local function each(command, key, arguments, step)
  local width = CHUNK - CHUNK % (step or 1)
  for first = 1, #arguments, width do
    redis.call(command, key, unpack(arguments, first, math.min(first + width - 1, #arguments)))
  end
end

-- The raw entries of these keys, false where there is none.
local function fetch(entries, keys)
  local found = {}
  for first = 1, #keys, CHUNK do
    local page = redis.call('HMGET', entries, unpack(keys, first, math.min(first + CHUNK - 1, #keys)))
    for i = 1, #page do
      found[first + i - 1] = page[i]
    end
  end
  return found
end

-- Add to the counts of keys and bytes per owner and subspace; `charged` has "subspace/owner" -> {keys, bytes}.
local function charge_all(usage, charged)
  for where, amount in pairs(charged) do
    if amount[1] ~= 0 or amount[2] ~= 0 then
      local keys, bytes = string.match(redis.call('HGET', usage, where) or '0 0', '^(%S+) (%S+)$')
      keys, bytes = tonumber(keys) + amount[1], tonumber(bytes) + amount[2]
      if keys == 0 and bytes == 0 then
        redis.call('HDEL', usage, where)
      else
        redis.call('HSET', usage, where, text(keys) .. ' ' .. text(bytes))
      end
    end
  end
end

local function charge(charged, key, owner, keys, bytes)
  local where = string.sub(key, 1, string.find(key, '/', 1, true)) .. owner
  local amount = charged[where]
  if amount then
    amount[1], amount[2] = amount[1] + keys, amount[2] + bytes
  else
    charged[where] = { keys, bytes }
  end
end
